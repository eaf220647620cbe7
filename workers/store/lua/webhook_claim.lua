-- Claim an attempt at delivering a job's end for one worker. A duplicate message comes before the attempt is due.
local id, lease, max_attempts = unpack(ARGV)
local job = job_key(id)
local now = now_ms()
if not redis.call('ZSCORE', WEBHOOKS, id) then
  return { 'settled' }
elseif number(redis.call('HGET', job, 'webhook:at')) > now then
  return { 'early' }
end
if number(redis.call('HGET', job, 'webhook:attempt')) >= tonumber(max_attempts) then
  -- The worker of the last attempt was lost. Attempts that kill their workers are not repeated.
  redis.call('HSET', job, 'webhook:state', 'failed', 'webhook:error', 'lost its worker')
  redis.call('ZREM', WEBHOOKS, id)
  return { 'settled' }
end
local attempt = redis.call('HINCRBY', job, 'webhook:attempt', 1)
local token = redis.call('HINCRBY', job, 'webhook:token', 1)
schedule_webhook(id, now + lease)
local seq, address, owner = unpack(redis.call('HMGET', job, 'webhook:seq', 'webhook', 'owner'))
return { 'claimed', token, attempt, seq, address, owner }
