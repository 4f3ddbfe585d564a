-- Record a (re)seek of a partition, forgetting its ranks first if asked to.
--
-- KEYS     1 the prefix of the namespace and shard
-- ARGV     1 partition (decimal) · 2 topic id · 3 restart offset (8 bytes) · 4 target (8 bytes)
--          5 '1' forget the ranks, else '0' · 6 catalogue version to give (16 bytes)
-- returns  {1} | {0, topic id} where another topic id is stored and the ranks are to be kept; nothing was written then
-- cost     O(ranks of the partition) where they are forgotten, else O(1); rows are left to their dead slots

local function seek(keys, args)
  enter()
  local pre, parts, p = keys[1], keys[1] .. 'parts', args[1]
  local stored = call('HGET', parts, p)
  call('DEL', pre .. 'unit:' .. p) -- whoever is in the middle of a unit has lost the partition, or begins again
  local same = stored and sub(stored, 49) == args[2]
  if args[5] == '1' then
    local ranks, touched, partition = pre .. 'ranks:' .. p, {}, pack('<I4', p)
    local all = call('HGETALL', ranks)
    for i = 1, #all, 2 do
      local slots, model = split_rank(all[i + 1])
      bury(pre, slots)
      if model then leave(pre, partition, all[i], model, touched) end
    end
    call('DEL', ranks)
    renew_versions(pre, touched, args[6])
  elseif stored and not same then
    return { 0, sub(stored, 49) }
  end
  -- times of another topic say nothing of this one
  local times = same and sub(stored, 25, 48) or pack('>i8i8i8', 0, -1, 0)
  call('HSET', parts, p, args[3] .. args[3] .. args[4] .. times .. args[2])
  return { 1 }
end

redis.register_function { function_name = 'kvledger0_seek_' .. BUILD, callback = seek, flags = { 'allow-oom' } }
