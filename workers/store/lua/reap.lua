-- Return the due jobs that need a wake-up: never sent, sent but lost, or left by a worker whose lease expired; and
-- those whose webhook is due. Their due times are moved forward, so any number of processes may run this.
-- `run`, `webhook`: messages of Celery's with placeholders, to be put into the queues; '' sends none.
local limit, resend, max_attempts, run, webhook = unpack(ARGV)
local now = now_ms()
local wake = {}
detect_outage(now)

-- Queues are ordered: once as many messages have left a queue as were sent up to that of a job, its message has left,
-- too. If the job still waits then, the worker that took the message is dead.
local gone = {}
for _, queue in ipairs({ 'interactive', 'batch', 'webhooks' }) do
  gone[queue] = number(redis.call('HGET', SENT, queue)) - redis.call('LLEN', queue)
end

local function unsent_or_lost(queue, sent)
  return not sent or tonumber(sent) <= gone[queue]
end

local function send(id, queue)
  wake[#wake + 1] = { id, queue }
  local number_sent = redis.call('HINCRBY', SENT, queue, 1)
  local message = queue == 'webhooks' and webhook or run
  if message ~= '' then
    message = string.gsub(string.gsub(message, 'JOB%-ID', id), 'DELIVERY%-TAG', id .. ':' .. number_sent)
    redis.call('LPUSH', queue, message)
  end
  return number_sent
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', ms(now), 'LIMIT', 0, limit)) do
  local job = job_key(id)
  local status, stalled, cancel, sent, priority = unpack(
    redis.call('HMGET', job, 'status', 'stalled', 'cancel', 'sent', 'priority'))
  if status == 'in_progress' and cancel then
    finish_cancelled(id)
  elseif status == 'in_progress' and number(stalled) >= tonumber(max_attempts) then
    fail_poison_job(id, number(stalled))
  else
    schedule_check(id, now + resend)
    if status == 'in_progress' or unsent_or_lost(priority, sent) then
      redis.call('HSET', job, 'sent', send(id, priority))
    end
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', WEBHOOKS, '-inf', ms(now), 'LIMIT', 0, limit)) do
  redis.call('ZADD', WEBHOOKS, ms(now + resend), id)
  if unsent_or_lost('webhooks', redis.call('HGET', job_key(id), 'webhook:sent')) then
    redis.call('HSET', job_key(id), 'webhook:sent', send(id, 'webhooks'))
  end
end
return wake
