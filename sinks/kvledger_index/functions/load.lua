-- One partition as a worker finds it, of one moment.
--
-- KEYS     1 the prefix of the namespace and shard
-- ARGV     1 partition (decimal)
-- returns  {its value in parts or nil, fields and values of ranks:<partition>}
-- cost     O(ranks of the partition)

local function load_partition(keys, args)
  enter()
  return { call('HGET', keys[1] .. 'parts', args[1]), call('HGETALL', keys[1] .. 'ranks:' .. args[1]) }
end

-- no-writes also lets it run at maxmemory, where a MULTI would be refused
redis.register_function { function_name = 'kvledger0_load_' .. BUILD, callback = load_partition, flags = { 'no-writes' } }
