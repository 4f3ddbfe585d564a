#!lua flags=no-writes
-- One partition as a worker finds it; see read.lua for why it is a script.
--
-- KEYS     1 the prefix of the namespace and shard
-- ARGV     1 partition (decimal)
-- returns  {its value in parts or nil, fields and values of ranks:<partition>}
-- cost     O(ranks of the partition)

local call, pre = redis.call, KEYS[1]
return { call('HGET', pre .. 'parts', ARGV[1]), call('HGETALL', pre .. 'ranks:' .. ARGV[1]) }
