-- Store a batch whose requests are the lines of a file, or return the batch created before with the same idempotency key.
local batch, owner, origin, key_id, models, input, endpoint, window, lifetime, metadata, budget, defaults, output_keep, most,
  idempotency, digest, quota = unpack(ARGV)
local now, key = now_ms(), batch_key(batch)

local repeated = idempotency ~= '' and find_repeat(idempotency, digest, batch_key)
if repeated then
  return repeated
end
if redis.call('SCARD', open_batches_of(owner)) >= tonumber(most) then
  return { 'full' }
elseif redis.call('EXISTS', file_key(input)) == 0 then
  return { 'gone' }
end
if budget ~= 'null' then
  local refusal = reserve_quota(key, owner, quota, 0, cjson.decode(budget), now)
  if refusal then
    return refusal
  end
end
if idempotency ~= '' then
  redis.call('HSET', idempotency, 'job', batch, 'digest', digest)
  redis.call('EXPIRE', idempotency, 86400)
end
redis.call('HSET', key, 'id', batch, 'owner', owner, 'origin', origin, 'key', key_id, 'models', models, 'created', seconds(now),
  'input', input, 'endpoint', endpoint, 'window', window, 'expires', seconds(now + lifetime), 'metadata', metadata,
  'budget', budget, 'defaults', defaults, 'output_keep', output_keep, 'stage', 'validating', 'running', 1, 'total', 0,
  'fed', '0:0:0', 'written', '0:0:0', 'succeeded', 0, 'errored', 0)
redis.call('HINCRBY', file_key(input), 'readers', 1)
redis.call('ZADD', OPEN_BATCHES, ms(now), batch)
redis.call('SADD', open_batches_of(owner), batch)
list_batch(batch, owner)
return { 'created', batch }
