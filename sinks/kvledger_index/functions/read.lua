#!lua flags=no-writes
-- One moment of the index, for a router: what moves, the partitions, the clock and the rows of a prompt.
--
-- A script of its own and not a transaction: at maxmemory Redis refuses to queue any command of a MULTI, also reads. And
-- not a function: a router then needs no right to load one.
--
-- KEYS     1 the prefix of the namespace and shard
-- ARGV     1 model · 2 how many partitions follow · the partitions (decimal) · first keys of rows (8 bytes each)
-- returns  {TIME, fields and values of now:<model>, values of parts, rows}; nil for what is not there
-- cost     O(ranks of the model + partitions + rows)

local CHUNK = 1000 -- arguments per command: Lua's unpack has no room for more than some thousands
local call, pre = redis.call, KEYS[1]

local function many(command, key, first, last, prefix)
  local out = {}
  for from = first, last, CHUNK do
    local to = math.min(from + CHUNK - 1, last)
    local names = key and { key } or {}
    for i = from, to do names[#names + 1] = prefix .. ARGV[i] end
    local values = call(command, unpack(names))
    for i = 1, to - from + 1 do out[from - first + i] = values[i] end
  end
  return out
end

local rows = 3 + ARGV[2]
return {
  call('TIME'),
  call('HGETALL', pre .. 'now:' .. ARGV[1]),
  many('HMGET', pre .. 'parts', 3, rows - 1, ''),
  many('MGET', nil, rows, #ARGV, pre .. 'r:'),
}
