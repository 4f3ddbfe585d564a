-- Apply a step: units of one partition in log order and its progress, all or nothing; or a piece of a larger unit.
--
-- KEYS     1 the prefix of the namespace and shard
-- ARGV     1 partition (decimal) · 2 topic id · 3 restart offset expected (8 bytes) · 4 restart and read offset (16 bytes)
--          5 '1' at the log's end, else '0' · 6 newest log time (8 bytes) · 7 catalogue version to give (16 bytes)
--          8 new slots needed at most (decimal) · 9 the stamp below all others (32 bytes)
--          10 '' or, where the only unit is a piece: token (16 bytes), number (u32le), 1 the last, else 0
--          then per unit: rank · model · stamp before · stamp after · moving part · state · card, '' (unchanged) or '-'
--          (the rank leaves the catalogue) · ops
--          a piece before the last leaves stamp, state and card alone: it changes blocks, slots and the moving part
--          ops: 'B' new life | 'C' medium | 'D' unload | 'R' row (8), puts (u32le), then per put: 1 add or 0 remove,
--          medium, lane, position, n (a byte each), mask u16le, parent (8), n x key (8)
-- returns  {1, applied, duplicates} | {0, 'partition'} | {0, 'progress', topic id, restart} | {0, 'rank', rank, stamp}
--          | {0, 'piece', rank}; nothing was written where the first is 0
-- cost     O(units + ops), no key is scanned; see rows.lua for a put

local HEAD, UNIT = 10, 8
local STAMP, SLOTS, RANK_HEAD = 32, 16, 50
local NO_SLOTS = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
local SLOT_MAX = 4294967295

-- a < b as bytes. Lua's own < follows the server's locale (strcoll), which does not order bytes.
local function below(a, b)
  for i = 1, #a do
    local x, y = byte(a, i), byte(b, i)
    if x ~= y then return x < y end
  end
  return false
end

local function clock_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- a rank's stored value -> slots, model; false where it has none or cannot be read
local function split_rank(value)
  if not value or #value < RANK_HEAD then return NO_SLOTS, false end
  local low, high = byte(value, 49, 50)
  return sub(value, STAMP + 1, STAMP + SLOTS), sub(value, RANK_HEAD + 1, RANK_HEAD + low + high * 256)
end

local function bury(pre, slots)
  for i = 1, #slots, 4 do
    local slot = sub(slots, i, i + 3)
    if slot ~= '\0\0\0\0' then call('RPUSH', pre .. 'dead', slot) end
  end
end

-- new slots for media first..last of `slots`
local function renew_slots(pre, slots, first, last)
  bury(pre, sub(slots, first * 4 + 1, last * 4 + 4))
  local fresh = {}
  local top = call('INCRBY', pre .. 'slot', last - first + 1)
  for medium = first, last do fresh[#fresh + 1] = pack('<I4', top - last + medium) end
  return sub(slots, 1, first * 4) .. table.concat(fresh) .. sub(slots, last * 4 + 5)
end

-- the puts of one row, from `at` on; returns where the next op starts
local function run_row(pre, slots, ops, at)
  open_row(pre .. 'r:' .. sub(ops, at, at + 7))
  local puts = unpack_bytes('<I4', ops, at + 8)
  at = at + 12
  for _ = 1, puts do
    local add, medium, lane, position, n, low, high = byte(ops, at, at + 6)
    local slot = sub(slots, medium * 4 + 1, medium * 4 + 4)
    if slot ~= '\0\0\0\0' then
      put(add == 1, slot .. char(lane), position, low + high * 256, sub(ops, at + 7, at + 14), ops, at + 15, n)
    end
    at = at + 15 + n * 8
  end
  close_row()
  return at
end

local function run_ops(pre, slots, ops)
  local at = 1
  while at <= #ops do
    local kind = byte(ops, at)
    if kind == 82 then -- R
      at = run_row(pre, slots, ops, at + 1)
    elseif kind == 66 then -- B
      slots, at = renew_slots(pre, slots, 0, 3), at + 1
    elseif kind == 67 then -- C: a rank without slots stays without
      local medium = byte(ops, at + 1)
      if slots ~= NO_SLOTS then slots = renew_slots(pre, slots, medium, medium) end
      at = at + 2
    else -- D
      bury(pre, slots)
      slots, at = NO_SLOTS, at + 1
    end
  end
  return slots
end

-- take a rank out of a model's catalogue, unless another partition holds it there
local function leave(pre, partition, rank, model, touched)
  local card = call('HGET', pre .. 'cat:' .. model, rank)
  if card and sub(card, 1, 4) ~= partition then return end
  call('HDEL', pre .. 'cat:' .. model, rank)
  call('HDEL', pre .. 'now:' .. model, rank)
  touched[model] = true
end

-- give each touched catalogue its new version; an empty one goes
local function renew_versions(pre, touched, version)
  for model in pairs(touched) do
    local cat, now = pre .. 'cat:' .. model, pre .. 'now:' .. model
    if call('HLEN', cat) - call('HEXISTS', cat, 'v') > 0 then
      call('HSET', cat, 'v', version)
      call('HSET', now, 'v', version)
      call('SADD', pre .. 'models', model)
    else
      call('DEL', cat, now)
      call('SREM', pre .. 'models', model)
    end
  end
end

-- one unit at args[i]; `value` is the rank's stored value; returns the new one, with this stamp and state
local function apply_unit(pre, partition, value, args, i, touched, stamp, state)
  local rank, model, card = args[i], args[i + 1], args[i + 6]
  local before, old_model = split_rank(value)
  local slots = run_ops(pre, before, args[i + 7])
  if old_model and old_model ~= model then leave(pre, partition, rank, old_model, touched) end
  if card == '-' then
    leave(pre, partition, rank, model, touched)
    return stamp .. slots .. pack('<I2', #model) .. model .. state
  end
  local cat = pre .. 'cat:' .. model
  if card ~= '' then
    call('HSET', cat, rank, partition .. slots .. card)
    touched[model] = true
  elseif slots ~= before then
    local old = call('HGET', cat, rank)
    if old then call('HSET', cat, rank, sub(old, 1, 4) .. slots .. sub(old, 5 + SLOTS)) end
    touched[model] = true
  end
  -- readers see by `t` whether anything of the model changed while they read
  call('HSET', pre .. 'now:' .. model, rank, args[i + 4], 't', args[7])
  return stamp .. slots .. pack('<I2', #model) .. model .. state
end

-- a piece before the last: the rank's stored stamp and state stay
local function apply_piece(pre, partition, ranks, value, args, touched)
  local i = HEAD + 1
  local _, model = split_rank(value)
  local state = model and sub(value, RANK_HEAD + #model + 1) or ''
  call('HSET', ranks, args[i], apply_unit(pre, partition, value, args, i, touched, args[i + 2], state))
  renew_versions(pre, touched, args[7])
end

-- which units follow what is stored: {index...}, values by rank; or nil and the refusal
local function verify(ranks, args)
  local values, stamps, due = {}, {}, {}
  for i = HEAD + 1, #args, UNIT do
    local rank = args[i]
    if values[rank] == nil then
      values[rank] = call('HGET', ranks, rank)
      stamps[rank] = values[rank] and sub(values[rank], 1, STAMP) or args[9]
    end
    local stamp = stamps[rank]
    if stamp == args[i + 2] then
      due[#due + 1] = i
      stamps[rank] = args[i + 3]
    elseif below(stamp, args[i + 3]) then
      return nil, { 0, 'rank', rank, stamp }
    end
  end
  return due, values
end

local function apply(keys, args)
  enter()
  local pre, parts, p = keys[1], keys[1] .. 'parts', args[1]
  local stored = call('HGET', parts, p)
  if not stored then return { 0, 'partition' } end
  if sub(stored, 49) ~= args[2] or sub(stored, 1, 8) ~= args[3] then
    return { 0, 'progress', sub(stored, 49), sub(stored, 1, 8) }
  end
  if (call('GET', pre .. 'slot') or 0) + args[8] > SLOT_MAX then
    return redis.error_reply('KVSLOTS all slots are used up')
  end
  local ranks = pre .. 'ranks:' .. p
  local due, values = verify(ranks, args)
  if not due then return values end
  local partition, touched = pack('<I4', p), {}
  local piece, unit = args[10], pre .. 'unit:' .. p
  if piece ~= '' and #due > 0 and sub(piece, 17, 20) ~= '\0\0\0\0' and call('GET', unit) ~= sub(piece, 1, 20) then
    return { 0, 'piece', args[HEAD + 1] }
  end
  if sub(piece, 21) == '\0' then
    if #due > 0 then
      apply_piece(pre, partition, ranks, values[args[HEAD + 1]], args, touched)
      call('SET', unit, sub(piece, 1, 16) .. pack('<I4', unpack_bytes('<I4', piece, 17) + 1))
    end
    return { 1, 0, 0 }
  end
  if #due > 0 then call('DEL', unit) end
  for k = 1, #due do
    local i = due[k]
    local value = apply_unit(pre, partition, values[args[i]], args, i, touched, args[i + 3], args[i + 5])
    values[args[i]] = value
    call('HSET', ranks, args[i], value)
  end
  renew_versions(pre, touched, args[7])
  local now = pack('>i8', clock_ms())
  local alive = args[5] == '1' and now or sub(stored, 25, 32)
  local log = sub(stored, 33, 48)
  if unpack_bytes('>i8', args[6]) > unpack_bytes('>i8', log) then log = args[6] .. now end
  call('HSET', parts, p, args[4] .. sub(stored, 17, 24) .. alive .. log .. args[2])
  return { 1, #due, (#args - HEAD) / UNIT - #due }
end

redis.register_function('kvledger0_apply_' .. BUILD, apply)
-- The same for steps that add no block: at maxmemory Redis refuses `apply` as a whole, but removals must still pass.
redis.register_function { function_name = 'kvledger0_shrink_' .. BUILD, callback = apply, flags = { 'allow-oom' } }
