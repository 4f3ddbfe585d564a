-- Free what dead slots still occupy: a bounded piece of a pass over all rows, from where the last call left off.
--
-- A pass takes slots off the list of dead ones into a set, visits every row once and forgets the set. No entry of a dead
-- slot is ever added again, so whatever else runs between two calls, what a pass has to find is there when it begins.
--
--   scrub         HASH    at -> cursor of SCAN, or 'end' · run -> the server's run id · side -> cursor in the side of the
--                         first row left over; there while a pass visits rows
--   scrub:slots   SET     slots that this pass frees
--   scrub:rows    LIST    rows that SCAN brought and a call had no time for
--
-- A cursor means something to the process that gave it only: under another run id the pass starts again.
--
-- KEYS     1 the prefix of the namespace and shard
-- ARGV     1 keys and side fields to look at, at most (decimal; one SCAN or HSCAN may bring some more)
--          2 seconds of the server's CPU time after which to stop
-- returns  {0 nothing to do, 1 more to do, 2 a pass ended; entries freed; rows freed; keys and fields looked at;
--          slots still to free}
-- cost     O(argument 1 x holders of a row), never O(keys); O(1) where no slot is dead

local SCAN_KEYS, SIDE_FIELDS, COMMAND_ARGS = 64, 256, 1000
local SLOTS_PER_CALL, SLOTS_PER_PASS = 4000, 65536

local scrub_slots, verdicts, row_lists, side_lists
local allowed, until_clock, looked, freed, emptied, side_at

local function spent()
  return looked >= allowed or os.clock() >= until_clock
end

-- a command on `name` with all of `args`, in pieces that unpack can bear
local function in_pieces(command, name, args)
  for i = 1, #args, COMMAND_ARGS do
    call(command, name, unpack(args, i, math.min(#args, i + COMMAND_ARGS - 1)))
  end
end

local function is_dead(slot)
  local dead = verdicts[slot]
  if dead == nil then
    dead = call('SISMEMBER', scrub_slots, slot) == 1
    verdicts[slot] = dead
  end
  return dead
end

-- entries of `width` bytes less those of dead slots; neighbouring rows mostly carry the same, which is worked out once
local function living(list, width, known)
  local kept = known[list]
  if kept then return kept end
  local pieces, from = {}, 1
  for at = 1, #list, width do
    if is_dead(sub(list, at, at + 3)) then
      if at > from then pieces[#pieces + 1] = sub(list, from, at - 1) end
      from = at + width
    end
  end
  kept = list
  if from > 1 or #pieces > 0 then kept = table.concat(pieces) .. sub(list, from) end
  known[list] = kept
  return kept
end

-- one side from `side_at` on; leaves there where it stopped, '0' at the end
local function scrub_side(name)
  repeat
    local page = call('HSCAN', name, side_at, 'COUNT', SIDE_FIELDS)
    local fields, set, gone = page[2], {}, {}
    side_at = page[1]
    for i = 1, #fields, 2 do
      local value = fields[i + 1]
      local kept = #value % 5 == 0 and living(value, 5, side_lists) or value
      freed = freed + (#value - #kept) / 5
      if kept == '' and value ~= '' then
        gone[#gone + 1] = fields[i]
      elseif #kept < #value then
        set[#set + 1] = fields[i]
        set[#set + 1] = kept
      end
    end
    in_pieces('HSET', name, set)
    in_pieces('HDEL', name, gone)
    looked = looked + #fields / 2
  until side_at == '0' or spent()
end

-- one row and as much of its side as there is time for; true if all of it is done
local function scrub_row(name)
  open_row(name)
  -- gone meanwhile, or not a row: readers say of those that they met one, so it stays until the next put
  if not found or changed then return true end
  local kept = living(entries, 7, row_lists)
  if #kept < #entries then
    freed = freed + (#entries - #kept) / 7
    entries, changed = kept, true
  end
  if side then
    scrub_side(name .. '/')
    side = call('EXISTS', name .. '/') == 1
    changed = changed or not side
  else
    side_at = '0'
  end
  close_row()
  if changed and entries == '' and not side then emptied = emptied + 1 end
  return side_at == '0'
end

-- the next slots off the list of dead ones; true where a pass has all that it will free
local function gather(pre)
  local slots = call('LPOP', pre .. 'dead', SLOTS_PER_CALL)
  if slots then in_pieces('SADD', scrub_slots, slots) end
  return call('LLEN', pre .. 'dead') == 0 or call('SCARD', scrub_slots) >= SLOTS_PER_PASS
end

-- rows from cursor `at` on, `left` first; returns the cursor and the rows that are still to be done
local function visit(pre, at, left)
  local names, first = left, 1
  repeat
    if first > #names and at ~= 'end' then
      local count = math.max(1, math.min(SCAN_KEYS, allowed - looked))
      local page = call('SCAN', at, 'MATCH', pre .. 'r:*', 'COUNT', count, 'TYPE', 'string')
      at, names, first = page[1], page[2], 1
      if at == '0' then at = 'end' end
      looked = looked + math.max(count, #names)
    end
    while first <= #names and scrub_row(names[first]) do
      side_at, first = '0', first + 1
      if os.clock() >= until_clock then break end
    end
  until spent() or (at == 'end' and first > #names)
  local rest = {}
  for i = first, #names do rest[#rest + 1] = names[i] end
  return at, rest
end

local function scrub(keys, args)
  enter()
  local pre = keys[1]
  local pass, rows = pre .. 'scrub', pre .. 'scrub:rows'
  scrub_slots, verdicts, row_lists, side_lists = pre .. 'scrub:slots', {}, {}, {}
  allowed, until_clock = tonumber(args[1]), os.clock() + tonumber(args[2])
  looked, freed, emptied = 0, 0, 0
  local stored = call('HMGET', pass, 'at', 'run', 'side')
  local at, left = stored[1], {}
  side_at = stored[3] or '0'
  if not at then
    local ready = gather(pre)
    if call('EXISTS', scrub_slots) == 0 then return { 0, 0, 0, 0, 0 } end
    at = ready and '0' or false
  end
  local run = at and string.match(call('INFO', 'server'), 'run_id:(%x+)') or ''
  if stored[1] and stored[2] ~= run then
    at, side_at = '0', '0'
  elseif stored[1] then
    left = call('LRANGE', rows, 0, -1)
  end
  call('DEL', rows)
  local done = false
  if at then
    at, left = visit(pre, at, left)
    done = at == 'end' and #left == 0
    in_pieces('RPUSH', rows, left)
    call('HSET', pass, 'at', at, 'run', run, 'side', side_at)
  end
  if done then call('DEL', pass, scrub_slots) end
  local waiting = call('LLEN', pre .. 'dead') + call('SCARD', scrub_slots)
  return { done and 2 or 1, freed, emptied, looked, waiting }
end

-- what it writes is less than what it frees, so it may run above maxmemory
redis.register_function { function_name = 'kvledger0_scrub_' .. BUILD, callback = scrub, flags = { 'allow-oom' } }
