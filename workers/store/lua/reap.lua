-- End jobs that nobody has begun by their deadline, make those ready whose delay is over, put messages into the queues
-- until there is one for each ready job, and wake those left by a worker whose lease expired, and those whose webhook is
-- due. Return the jobs for which messages were put, with their queues. What is done depends on what is there alone, so
-- any number of processes may run this.
-- `run`, `webhook`: messages of Celery's with placeholders; '' keeps those of another call. `owners`: the settings of
-- owners (JSON), by their names; '' likewise.
local LOST_MS = 1000
local limit, resend, max_attempts, run, webhook, owners = unpack(ARGV)
local now = now_ms()
local wake = {}
detect_outage(now)

if run ~= '' then
  redis.call('HSET', WAKEUPS, 'run', run, 'webhook', webhook)
end
if owners ~= '' and redis.call('GET', OWNERS .. ':text') ~= owners then
  redis.call('SET', OWNERS .. ':text', owners)
  redis.call('DEL', OWNERS)
  for owner, settings in pairs(cjson.decode(owners)) do
    redis.call('HSET', OWNERS, owner, cjson.encode(settings))
  end
end

local function send(id, queue, push)
  wake[#wake + 1] = { id, queue }
  return send_wakeup(queue, id, push or 'LPUSH')
end

-- Return the number of messages of a queue on their way to a claim: in the list, or in a worker. Of those that left the
-- list, the ones without a claim after LOST_MS are lost.
local function count_on_their_way(queue)
  local sent, claimed, gone_before, at = unpack(
    redis.call('HMGET', SENT, queue, queue .. ':claimed', queue .. ':gone', queue .. ':at'))
  local gone = number(sent) - redis.call('LLEN', queue)
  claimed = math.min(number(claimed), gone)
  if math.abs(now - number(at)) >= LOST_MS then
    claimed = math.max(claimed, math.min(number(gone_before), gone))
    redis.call('HSET', SENT, queue .. ':gone', ms(gone), queue .. ':at', ms(now))
  end
  redis.call('HSET', SENT, queue .. ':claimed', ms(claimed))
  return number(sent) - claimed
end

-- Send messages until as many are on their way as there are ready jobs.
local function top_up(queue, covered)
  local missing = MAX_WAKEUPS - covered
  for _, owner in ipairs(redis.call('ZRANGE', shares_key(queue), 0, -1)) do
    if missing <= 0 then
      return
    end
    local ready = ready_key(queue, owner)
    local count = math.min(redis.call('ZCARD', ready), count_room(owner))
    local skipped = math.min(covered, count)
    covered = covered - skipped
    if count > skipped then
      for _, id in ipairs(redis.call('ZRANGE', ready, skipped, math.min(count, skipped + missing) - 1)) do
        send(id, queue)
        missing = missing - 1
      end
    end
  end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', ms(now), 'LIMIT', 0, limit)) do
  fail_expired_job(id)
end
local on_their_way = {}
for _, queue in ipairs({ 'interactive', 'batch' }) do
  on_their_way[queue] = count_on_their_way(queue)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', ms(now), 'LIMIT', 0, limit)) do
  local status, stalled, cancel, queue = unpack(
    redis.call('HMGET', job_key(id), 'status', 'stalled', 'cancel', 'priority'))
  if status == 'queued' then
    if make_ready(id) then
      on_their_way[queue] = on_their_way[queue] + 1
      wake[#wake + 1] = { id, queue }
    end
  elseif cancel then
    finish_cancelled(id)
  elseif number(stalled) >= tonumber(max_attempts) then
    fail_poison_job(id, number(stalled))
  else
    schedule_check(id, now + resend)
    send(id, queue, 'RPUSH') -- it has had its turn
  end
end
for queue, covered in pairs(on_their_way) do
  for _, owner in ipairs(redis.call('SMEMBERS', shares_key(queue) .. ':full')) do
    if count_room(owner) > 0 then -- by other settings
      leave_full(queue, owner)
    end
  end
  top_up(queue, covered)
end

-- The queue of webhooks is ordered: once as many messages have left it as were sent up to that of a job, its message has
-- left, too. If the webhook still waits then, the worker that took the message is dead.
local gone = number(redis.call('HGET', SENT, 'webhooks')) - redis.call('LLEN', 'webhooks')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', WEBHOOKS, '-inf', ms(now), 'LIMIT', 0, limit)) do
  redis.call('ZADD', WEBHOOKS, ms(now + resend), id)
  local sent = tonumber(redis.call('HGET', job_key(id), 'webhook:sent'))
  if not sent or sent <= gone then
    redis.call('HSET', job_key(id), 'webhook:sent', send(id, 'webhooks'))
  end
end
return wake
