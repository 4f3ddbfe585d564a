#!lua flags=no-writes
-- What stands beside the rows' paths, with what moves of the same moment; see read.lua for why it is a script.
--
-- KEYS     1 the prefix of the namespace and shard
-- ARGV     1 model · then per row: its first key (8 bytes) · up to 16 block keys, 8 bytes each, in one argument
-- returns  {fields and values of now:<model>, then per row the side's values in the order of the keys, nil for none}
-- cost     O(ranks of the model + keys)

local call, pre = redis.call, KEYS[1]
local out = { call('HGETALL', pre .. 'now:' .. ARGV[1]) }
for i = 2, #ARGV, 2 do
  local keys = {}
  for at = 1, #ARGV[i + 1], 8 do keys[#keys + 1] = string.sub(ARGV[i + 1], at, at + 7) end
  out[#out + 1] = call('HMGET', pre .. 'r:' .. ARGV[i] .. '/', unpack(keys))
end
return out
