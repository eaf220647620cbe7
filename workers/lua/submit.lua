-- Records a job and puts it in the outbox, or answers the job that the same idempotency key made before.
local id, spec, priority, cap, idempotency, digest = unpack(ARGV)
local now = now_ms()

if idempotency ~= '' then
  local known, body = unpack(redis.call('HMGET', idempotency, 'job', 'digest'))
  if known and redis.call('EXISTS', job_key(known)) == 1 then
    return { body == digest and 'replayed' or 'conflict', known }
  end
end
if redis.call('ZCARD', JOBS .. ':queued') >= tonumber(cap) then
  return { 'full' }
end
if idempotency ~= '' then
  redis.call('HSET', idempotency, 'job', id, 'digest', digest)
  redis.call('EXPIRE', idempotency, 86400)
end
local n = redis.call('INCR', 'reasoner:submitted')
redis.call('HSET', job_key(id), 'id', id, 'n', n, 'spec', spec, 'priority', priority, 'status', 'queued',
  'created', seconds(now), 'attempt', 0, 'token', 0, 'lease', 0, 'seq', 0)
redis.call('ZADD', JOBS, n, id)
redis.call('ZADD', JOBS .. ':queued', n, id)
append(id, 'job.queued', '{}')
look_at(id, now)
return { 'created', id }
