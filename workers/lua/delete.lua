-- Forgets a job that has ended.
local id = ARGV[1]
local status, owner = unpack(redis.call('HMGET', job_key(id), 'status', 'owner'))
if not status then
  return 'gone'
elseif status == 'queued' or status == 'in_progress' then
  return 'active'
end
for _, index in ipairs({ JOBS, owned(owner) }) do
  redis.call('ZREM', index, id)
  redis.call('ZREM', index .. ':' .. status, id)
end
local batch = redis.call('HGET', job_key(id), 'batch')
redis.call('DEL', job_key(id), job_key(id) .. ':log')
if batch then
  redis.call('LREM', batch_key(batch) .. ':jobs', 1, id)
  if redis.call('EXISTS', batch_key(batch) .. ':jobs') == 0 then -- the last of its jobs: the batch goes with it
    redis.call('DEL', batch_key(batch))
    redis.call('ZREM', 'reasoner:batches', batch)
    redis.call('ZREM', 'reasoner:batches:of:' .. owner, batch)
  end
end
return 'ok'
