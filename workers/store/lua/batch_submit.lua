-- Store a batch and its jobs, or return the batch created before with the same idempotency key. Every job is granted
-- its floor of the shared budget at once; the rest is the pool.
local batch, budget, metadata, floor, width, owner, origin, cap, idempotency, digest, quota = unpack(ARGV, 1, 11)
local now, key = now_ms(), batch_key(batch)
local first = 12
local count = (#ARGV - first + 1) / 3

local repeated = idempotency ~= '' and find_repeat(idempotency, digest, batch_key)
if repeated then
  return repeated
end
local missing = redis.call('ZCARD', JOBS .. ':queued') + count - tonumber(cap)
if missing > 0 then
  return { 'full', estimate_seconds(missing, { 'interactive', 'batch' }, now) }
end
local refusal = reserve_quota(key, owner, quota, count, cjson.decode(budget), now, ARGV[first + 2])
if refusal then
  return refusal
end
if idempotency ~= '' then
  redis.call('HSET', idempotency, 'job', batch, 'digest', digest)
  redis.call('EXPIRE', idempotency, 86400)
end
redis.call('HSET', key, 'id', batch, 'owner', owner, 'created', seconds(now), 'budget', budget, 'metadata', metadata,
  'pool', cjson.decode(budget).tokens - floor * count, 'floors', count, 'active', 0, 'running', count, 'width', width,
  'count:queued', count)
list_batch(batch, owner)
for i = first, #ARGV, 3 do
  local id, spec, priority = unpack(ARGV, i, i + 2)
  record(id, spec, priority, owner, origin, now)
  redis.call('HSET', job_key(id), 'batch', batch, 'granted', floor, 'share', 'floor')
  redis.call('RPUSH', key .. ':jobs', id)
end
return { 'created', batch }
