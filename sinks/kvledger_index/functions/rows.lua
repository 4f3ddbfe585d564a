-- Rows and sides: one path of up to 16 block keys with its holders, and what stands on other branches.
--
-- Shared by the functions of this library; registers none. One row is open at a time: open_row, put..., close_row.
--
--   row   STRING  byte: nodes L (0..16) + 128 if the row has a side; L x 8 bytes: keys of one path from position 0;
--                 then entries of 7 bytes: slot u32le, lane u8, mask u16le (bit p: holds the block whose key is node p)
--   side  HASH    key -> entries of 5 bytes: slot u32le, lane u8
--
-- One place per (block, holder): the row if the key is a node, else the side. Nodes are only appended, contiguously, and
-- only keys without a side field; a row without holders that has a side stays as a stub (one byte).
--
-- KEYS     the row, and the row .. '/' for its side
-- ARGV     puts inside an argument of apply.lua
-- returns  nothing
-- cost     one GET and at most one SET or DEL per row; O(1) per put, and O(holders) bytes are scanned for one's own
--          entry; a put that leaves the path costs one HMGET and one HSET or HDEL of its keys

local call, sub, byte, char, find, pack, unpack_bytes
local band, bor, bnot, lshift, rshift

-- while a library is loaded none of these exist; every function starts with this
local function enter()
  call, pack, unpack_bytes = redis.call, struct.pack, struct.unpack
  sub, byte, char, find = string.sub, string.byte, string.char, string.find
  band, bor, bnot, lshift, rshift = bit.band, bit.bor, bit.bnot, bit.lshift, bit.rshift
end

local row, found, length, nodes, entries, side, changed

local function open_row(name)
  row, changed = name, false
  length, nodes, entries, side = 0, '', '', false
  local x = call('GET', name)
  found = x and true or false
  if not x then return end
  local head = byte(x) or 255
  side = head >= 128
  length = side and head - 128 or head
  local ends = 1 + length * 8
  if length > 16 or #x < ends or (#x - ends) % 7 ~= 0 then
    -- not a row: it counts as absent, as it does for readers
    length, side, changed = 0, call('EXISTS', name .. '/') == 1, true
  else
    nodes, entries = sub(x, 2, ends), sub(x, ends + 1)
  end
end

local function close_row()
  if not changed then return end
  if entries ~= '' then
    call('SET', row, char(side and length + 128 or length) .. nodes .. entries)
  elseif side then
    call('SET', row, char(128))
  elseif found then
    call('DEL', row)
  end
end

-- where `who` stands among entries of `width` bytes, or nil
local function place(list, who, width)
  local at = find(list, who, 1, true)
  while at and (at - 1) % width ~= 0 do at = find(list, who, at + 1, true) end
  return at
end

local function put_row(add, who, mask)
  local at = place(entries, who, 7)
  if not at then
    if add then
      entries = entries .. who .. char(band(mask, 255), rshift(mask, 8))
      changed = true
    end
    return
  end
  local low, high = byte(entries, at + 5, at + 6)
  local old = low + high * 256
  local new = add and bor(old, mask) or band(old, bnot(mask))
  if new == old then return end
  changed = true
  if new == 0 then
    entries = sub(entries, 1, at - 1) .. sub(entries, at + 7)
  else
    entries = sub(entries, 1, at + 4) .. char(band(new, 255), rshift(new, 8)) .. sub(entries, at + 7)
  end
end

local function put_side(add, who, keys)
  local name = row .. '/'
  local have = call('HMGET', name, unpack(keys))
  local set, gone = {}, {}
  for i = 1, #keys do
    local x = have[i] or ''
    local at = place(x, who, 5)
    if add and not at then
      set[#set + 1] = keys[i]
      set[#set + 1] = x .. who
    elseif at and not add then
      if #x == 5 then
        gone[#gone + 1] = keys[i]
      else
        set[#set + 1] = keys[i]
        set[#set + 1] = sub(x, 1, at - 1) .. sub(x, at + 5)
      end
    end
  end
  if #set > 0 then call('HSET', name, unpack(set)) end
  if #gone > 0 then call('HDEL', name, unpack(gone)) end
  local was = side
  if add then side = true elseif #gone > 0 then side = call('EXISTS', name) == 1 end
  if side ~= was then changed = true end
end

-- appends the keys i..n (0-based, of `list` at `at`) that have no side field; returns how many keys are nodes then
local function append(list, at, i, n)
  local upto = n
  if side then
    local fields = {}
    for k = i, n - 1 do fields[#fields + 1] = sub(list, at + k * 8, at + k * 8 + 7) end
    local have = call('HMGET', row .. '/', unpack(fields))
    for k = 1, #fields do
      if have[k] then upto = i + k - 1 break end
    end
  end
  if upto > i then
    nodes = nodes .. sub(list, at + i * 8, at + upto * 8 - 1)
    length = length + upto - i
    changed = true
  end
  return upto
end

-- n keys of one path from `position` on stand in `list` at `at`; bit p of `mask` is the key at position p
local function put(add, who, position, mask, parent, list, at, n)
  local same = length - position
  if same > n then same = n elseif same < 0 then same = 0 end
  if same > 0 and sub(nodes, position * 8 + 1, (position + same) * 8) ~= sub(list, at, at + same * 8 - 1) then
    same = 0
    while sub(nodes, (position + same) * 8 + 1, (position + same) * 8 + 8) == sub(list, at + same * 8, at + same * 8 + 7) do
      same = same + 1
    end
  end
  -- the keys go on where the path ends, and from its last node
  if add and same < n and position + same == length and (same > 0 or length == 0 or sub(nodes, -8) == parent) then
    same = append(list, at, same, n)
  end
  local in_row = band(mask, lshift(1, position + same) - 1)
  local in_side = mask - in_row
  if in_row ~= 0 then put_row(add, who, in_row) end
  if in_side ~= 0 and (add or side) then
    local keys = {}
    for i = same, n - 1 do
      if band(in_side, lshift(1, position + i)) ~= 0 then keys[#keys + 1] = sub(list, at + i * 8, at + i * 8 + 7) end
    end
    put_side(add, who, keys)
  end
end
