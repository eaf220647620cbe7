-- Forgets a job that has ended.
local id = ARGV[1]
local status, n = unpack(redis.call('HMGET', job_key(id), 'status', 'n'))
if not status then
  return 'gone'
elseif status == 'queued' or status == 'in_progress' then
  return 'active'
end
redis.call('ZREM', JOBS, id)
redis.call('ZREM', JOBS .. ':' .. status, id)
local batch = redis.call('HGET', job_key(id), 'batch')
redis.call('DEL', job_key(id), job_key(id) .. ':log')
if batch then
  redis.call('LREM', batch_key(batch) .. ':jobs', 1, id)
  if redis.call('EXISTS', batch_key(batch) .. ':jobs') == 0 then -- the last of its jobs: the batch goes with it
    redis.call('DEL', batch_key(batch))
    redis.call('ZREM', 'reasoner:batches', batch)
  end
end
return 'ok'
