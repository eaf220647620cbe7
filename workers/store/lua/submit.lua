-- Store a job and make it due, and return its fields; or return the job created before with the same idempotency key.
local id, spec, priority, owner, origin, cap, idempotency, digest, form, quota = unpack(ARGV)
local now = now_ms()

local repeated = idempotency ~= '' and find_repeat(idempotency, digest, job_key)
if repeated then
  return repeated
end
local missing = redis.call('ZCARD', JOBS .. ':queued') + 1 - tonumber(cap)
if missing > 0 then
  return { 'full', estimate_seconds(missing, { 'interactive', 'batch' }, now) }
end
local refusal = reserve_quota(job_key(id), owner, quota, 1, cjson.decode(spec).budget, now, priority)
if refusal then
  return refusal
end
if idempotency ~= '' then
  redis.call('HSET', idempotency, 'job', id, 'digest', digest)
  redis.call('EXPIRE', idempotency, 86400)
end
record(id, spec, priority, owner, origin, now)
if form ~= '' then
  redis.call('HSET', job_key(id), 'form', form)
end
if idempotency ~= '' then
  redis.call('HSET', job_key(id), 'idempotency', idempotency)
end
return { 'created', id, redis.call('HGETALL', job_key(id)) }
