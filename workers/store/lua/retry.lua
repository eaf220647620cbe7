-- Queue a failed job again. Its journal stays, so replayed results are not charged again; attempts are counted anew.
local id, cap, quota = unpack(ARGV)
local job = job_key(id)
local status, owner, spec, batch, granted, generated, verified = unpack(
  redis.call('HMGET', job, 'status', 'owner', 'spec', 'batch', 'granted', 'usage:generated', 'usage:verifier_computed'))
local spent = number(generated) + number(verified)
if not status then
  return { 'gone' }
elseif status ~= 'failed' then
  return { status }
elseif redis.call('ZCARD', JOBS .. ':queued') >= tonumber(cap) then
  return { 'full', estimate_seconds(1, { 'interactive', 'batch' }, now_ms()) }
end
local deadline = cjson.decode(spec).deadline
if type(deadline) == 'number' and deadline * 1000 <= now_ms() then
  return { 'expired' }
elseif batch and redis.call('HEXISTS', batch_key(batch), 'input') == 1 then
  return { 'line' }
elseif batch then
  -- Take back the tokens that its end returned to the pool.
  local pool, cancelled = unpack(redis.call('HMGET', batch_key(batch), 'pool', 'cancel'))
  local back = number(granted) - spent
  if cancelled or number(pool) < back then
    return { 'shared' }
  end
  redis.call('HINCRBY', batch_key(batch), 'pool', -back)
  redis.call('HINCRBY', batch_key(batch), 'running', 1)
  redis.call('HINCRBY', batch_key(batch), 'active', 1)
  redis.call('HDEL', batch_key(batch), 'finished')
  redis.call('HSET', job, 'share', 'active')
else
  -- The spent tokens were committed at its end. The remaining budget is reserved as for a new job.
  local budget = cjson.decode(spec).budget or {}
  local rest = number(budget.tokens) - spent
  local refusal = reserve_quota(job, owner, quota, 1, { tokens = rest }, now_ms(),
    redis.call('HGET', job, 'priority'))
  if refusal then
    return refusal
  elseif quota ~= '' and cjson.decode(quota).tokens_a_day then
    redis.call('HSET', job, 'booked', ms(spent + rest))
  end
end
redis.call('HSET', job, 'attempt', 0, 'stalled', 0)
redis.call('HDEL', job, 'finished', 'result', 'error', 'cancel', 'best')
forget_wait(id)
set_in_list(id, ':dead')
set_in_list(id, ':ended')
redis.call('ZREM', WEBHOOKS, id) -- cancels the delivery of that end
redis.call('HDEL', job, 'webhook:state')
set_status(id, 'queued')
append(id, 'job.queued', '{"reason":"retry"}')
make_ready(id)
return { 'ok' }
