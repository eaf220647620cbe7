-- Record the outcome of an attempt: 'delivered', 'failed' for good, or 'pending' until the next one after a pause.
local id, token, state, failure, pause = unpack(ARGV)
local job = job_key(id)
if redis.call('HGET', job, 'webhook:token') ~= token or not redis.call('ZSCORE', WEBHOOKS, id) then
  return 'lost'
end
redis.call('HSET', job, 'webhook:state', state, 'webhook:error', failure)
redis.call('HINCRBY', STATS, 'webhooks:' .. state, 1)
if state == 'pending' then
  schedule_webhook(id, now_ms() + pause)
else
  redis.call('ZREM', WEBHOOKS, id)
end
return 'ok'
