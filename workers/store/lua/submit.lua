-- Store a job and make it due, or return the job created before with the same idempotency key.
local id, spec, priority, owner, origin, cap, idempotency, digest, form, quota = unpack(ARGV)
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
local refusal = book(job_key(id), owner, quota, 1, cjson.decode(spec).budget, now)
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
return { 'created', id }
