-- Looks at every job whose time has come and answers those that need a wake-up: recorded but never sent, sent but lost,
-- or left by a worker whose lease ran out; and those whose end is to be told. Moving their time forward makes it safe in
-- any number of processes.
local limit, resend, max_attempts = unpack(ARGV)
local now = now_ms()
-- While messages wait in the queues, a waiting job's own is most likely among them.
local backlog = redis.call('LLEN', 'interactive') + redis.call('LLEN', 'batch') > 0
local wake = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', ms(now), 'LIMIT', 0, limit)) do
  local job = job_key(id)
  local status, attempt, cancel, sent, priority = unpack(
    redis.call('HMGET', job, 'status', 'attempt', 'cancel', 'sent', 'priority'))
  if status == 'in_progress' and cancel then
    finish(id, 'cancelled', 'null', 'null')
  elseif status == 'in_progress' and number(attempt) >= tonumber(max_attempts) then
    give_up(id, number(attempt))
  else
    look_at(id, now + resend)
    if status == 'in_progress' or not (sent and backlog and now - number(sent) < 60000) then
      redis.call('HSET', job, 'sent', ms(now))
      wake[#wake + 1] = { id, priority }
    end
  end
end
-- An end that is to be told is sent once, and again only when no message of its queue is left.
local told = redis.call('LLEN', 'webhooks') == 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', WEBHOOKS, '-inf', ms(now), 'LIMIT', 0, limit)) do
  redis.call('ZADD', WEBHOOKS, ms(now + resend), id)
  if told or redis.call('HEXISTS', job_key(id), 'webhook:sent') == 0 then
    redis.call('HSET', job_key(id), 'webhook:sent', 1)
    wake[#wake + 1] = { id, 'webhooks' }
  end
end
return wake
