-- Cancel all jobs of a batch that have not ended: waiting ones at once, running ones through their workers. The
-- arguments after the batch are pairs of a job and the result (JSON) of its journal.
local batch = ARGV[1]
local best = {}
for i = 2, #ARGV, 2 do
  best[ARGV[i]] = ARGV[i + 1]
end
if redis.call('EXISTS', batch_key(batch)) == 0 then
  return 'gone'
end
if number(redis.call('HGET', batch_key(batch), 'running')) > 0 then
  redis.call('HSET', batch_key(batch), 'cancel', 1)
  redis.call('HSETNX', batch_key(batch), 'at:closing', seconds(now_ms()))
end
for _, id in ipairs(redis.call('LRANGE', batch_key(batch) .. ':jobs', 0, -1)) do
  cancel(id, best[id] or 'null')
end
return 'ok'
