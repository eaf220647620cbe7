-- Prepended to every script. The keys, the clock, and the two changes that several scripts make: an entry in a job's
-- stream and a change of its status. A script runs alone, so whatever it does is one step to everybody else.
--
--   reasoner:job:ID          hash: spec, owner, origin, status, times, attempt, token (fencing), lease (its end), term (how long it
--                            is), grace (1: it was prolonged without a word of the worker), seq, cancel,
--                            stalled (attempts in a row that wrote nothing new to the journal),
--                            best (what its journal allowed for a result when it was cancelled),
--                            usage:*, form (what a route keeps of the request beside the spec)
--   reasoner:job:ID:log      stream: the journal and the events, entry ids are SEQ-0
--   reasoner:job:ID:keys     set: keys of the journal's entries, until the job ends for good: a failed one may be retried
--   reasoner:jobs, :STATUS   sorted sets of ids by order of submission: all jobs, and those of one status
--   reasoner:jobs:dead       likewise: failed jobs that lost their worker too often
--   reasoner:jobs:ended      sorted set of ids of ended jobs by the time (ms) of their end
--   reasoner:jobs:of:OWNER, :of:OWNER:*   the same of one owner
--   reasoner:due             sorted set of unfinished ids by the time (ms) at which the reaper must look at them
--   reasoner:webhooks        likewise for ids of ended jobs whose end is still to be told; their hashes have webhook (its
--                            address) and webhook:state, :attempt, :token, :at (not before), :seq (of the end), :error
--   reasoner:waiting         set of ids: jobs that were handed back because no engine answered, until one does
--   reasoner:sent            hash: how many messages each queue was sent so far
--   reasoner:idempotency:*   hash: job and digest of the body, for a day
--   reasoner:quota:OWNER:DAY   tokens that the owner's jobs of that day (since the epoch) spent, and that unfinished ones
--                            have booked: a job's or a batch's hash has its quota, and how much it has booked there
--   reasoner:key:ID          hash: name, owner, scopes, digest, created, expires, revoked
--   reasoner:keys            sorted set of ids of keys by order of creation
--   reasoner:bucket:KEY      when (ms) the bucket of a key's requests is full again
--   reasoner:batch:ID        hash: owner, budget, metadata, times, pool (tokens that no job holds), floors and active (jobs
--                            that spend their first grant, or a later one), count:STATUS, usage:*, cancel
--   reasoner:batch:ID:jobs   list of its jobs' ids; each job's hash names the batch, what it was granted, and its share:
--                            floor, waiting, active, closed
--   reasoner:batch:ID:waiting  sorted set of jobs that ask for more by the gain that a token promises there
--   reasoner:batches, :of:OWNER   sorted sets of ids by order of submission: all batches, and those of one owner
--   reasoner:looked          when (ms) somebody last looked for leases that ran out
--   reasoner:stats           hash: counters for /metrics

local JOBS, DUE, WEBHOOKS, SENT, STATS = 'reasoner:jobs', 'reasoner:due', 'reasoner:webhooks', 'reasoner:sent', 'reasoner:stats'
local LOOKED = 'reasoner:looked'
local WAITING = 'reasoner:waiting'

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function job_key(id)
  return 'reasoner:job:' .. id
end

local function number(value)
  return tonumber(value) or 0
end

local function batch_key(id)
  return 'reasoner:batch:' .. id
end

local function owned(owner)
  return JOBS .. ':of:' .. owner
end

local function ms(value)
  return string.format('%.0f', value)
end

local function seconds(value)
  return string.format('%.3f', value / 1000)
end

local function append(id, kind, data, ...)
  local seq = redis.call('HINCRBY', job_key(id), 'seq', 1)
  redis.call('XADD', job_key(id) .. ':log', seq .. '-0', 'type', kind, 'at', seconds(now_ms()), 'data', data, ...)
  return seq
end

local function set_status(id, status)
  local before, n, owner, batch = unpack(redis.call('HMGET', job_key(id), 'status', 'n', 'owner', 'batch'))
  for _, index in ipairs({ JOBS, owned(owner) }) do
    redis.call('ZREM', index .. ':' .. before, id)
    redis.call('ZADD', index .. ':' .. status, n, id)
  end
  redis.call('HSET', job_key(id), 'status', status)
  if batch then
    redis.call('HINCRBY', batch_key(batch), 'count:' .. before, -1)
    redis.call('HINCRBY', batch_key(batch), 'count:' .. status, 1)
  end
end

-- Puts a job into one of the lists beside those of its status, or takes it out.
local function list(id, kind, score)
  for _, index in ipairs({ JOBS, owned(redis.call('HGET', job_key(id), 'owner')) }) do
    if score then
      redis.call('ZADD', index .. kind, score, id)
    else
      redis.call('ZREM', index .. kind, id)
    end
  end
end

local function look_at(id, time)
  redis.call('ZADD', DUE, ms(time), id)
end

-- Counts an attempt that begins.
local function begin_attempt(id)
  redis.call('HINCRBY', job_key(id), 'stalled', 1)
  return redis.call('HINCRBY', job_key(id), 'attempt', 1)
end

-- The attempt did not end by itself: it does not count.
local function take_attempt_back(id)
  redis.call('HINCRBY', job_key(id), 'attempt', -1)
  if number(redis.call('HGET', job_key(id), 'stalled')) > 0 then -- else it has written something new
    redis.call('HINCRBY', job_key(id), 'stalled', -1)
  end
end

-- Its worker has just been heard of.
local function renew(id, lease)
  local ends = now_ms() + lease
  redis.call('HSET', job_key(id), 'lease', ms(ends), 'term', lease, 'grace', 0)
  look_at(id, ends)
end

-- The clock was set back, or another server with a slower one took over: what was to happen at a time happens as much
-- earlier, or dead workers would keep their jobs for as long.
local function set_back(by)
  for _, index in ipairs({ DUE, WEBHOOKS }) do
    for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
      redis.call('ZINCRBY', index, -by, id)
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', JOBS .. ':in_progress', 0, -1)) do
    redis.call('HINCRBY', job_key(id), 'lease', -by)
  end
  for _, id in ipairs(redis.call('ZRANGE', WEBHOOKS, 0, -1)) do
    redis.call('HINCRBY', job_key(id), 'webhook:at', -by)
  end
end

-- Called before leases are found to have run out. A worker is dead when nothing was heard of it although it could have
-- been. When nobody has looked for long, this server or every reaper was away, and perhaps the workers could not reach it
-- either: a lease that held then is prolonged by one, until its worker has had the time for a word. That is done once:
-- without a word the next look finds it run out, however seldom somebody looks.
local function look_for_outage(now)
  local last = number(redis.call('GET', LOOKED))
  redis.call('SET', LOOKED, ms(now))
  local gap = now - last
  if gap < 0 then
    set_back(-gap)
  elseif last > 0 and gap > 750 then -- reapers look twice a second
    for _, id in ipairs(redis.call('ZRANGE', JOBS .. ':in_progress', 0, -1)) do
      local lease, term, grace = unpack(redis.call('HMGET', job_key(id), 'lease', 'term', 'grace'))
      local ends = ms(now + number(term))
      if 3 * gap > number(term) and number(lease) > last and grace ~= '1' then
        redis.call('HSET', job_key(id), 'lease', ends, 'grace', 1)
        look_at(id, ends)
      end
    end
  end
end

-- The end of a job is to be told, not before a time.
local function tell_at(id, time)
  redis.call('HSET', job_key(id), 'webhook:at', ms(time))
  redis.call('HDEL', job_key(id), 'webhook:sent')
  redis.call('ZADD', WEBHOOKS, ms(time), id)
end

-- Hands the pool of a batch out: the rule of reasoner.budget.allocator.Pool. Grants wake their jobs.
local function deal(batch)
  local key = batch_key(batch)
  while true do
    local pool, floors, active, width, cancel = unpack(
      redis.call('HMGET', key, 'pool', 'floors', 'active', 'width', 'cancel'))
    pool, floors, active = number(pool), number(floors), number(active)
    if floors > 0 or active >= number(width) or cancel then
      return
    end
    local best = redis.call('ZREVRANGE', key .. ':waiting', 0, 0, 'WITHSCORES')
    if not best[1] then
      return
    end
    local id, gain = best[1], number(best[2])
    local tokens, share = 0, 'closed'
    if gain > 0 then
      if pool == 0 and active > 0 then
        return -- what the active ones leave may still reach it
      end
      tokens = math.min(number(redis.call('HGET', job_key(id), 'asked')), pool)
    end
    if tokens > 0 then
      share = 'active'
      redis.call('HINCRBY', key, 'active', 1)
      redis.call('HINCRBY', key, 'pool', -tokens)
      redis.call('HINCRBY', job_key(id), 'granted', tokens)
    end
    redis.call('ZREM', key .. ':waiting', id)
    redis.call('HSET', job_key(id), 'share', share)
    look_at(id, now_ms())
  end
end

-- A job gives its place up: it asks for more, or has ended.
local function leave_share(batch, id, share)
  local place = ({ floor = 'floors', active = 'active' })[share]
  if place then
    redis.call('HINCRBY', batch_key(batch), place, -1)
  end
  redis.call('ZREM', batch_key(batch) .. ':waiting', id)
end

-- Whether an owner may have so many jobs more, with a budget of tokens, by a quota (JSON; empty: none). Books the tokens
-- on the holder, the hash of a job or a batch, until its end; or answers what is in the way.
local function book(holder, owner, quota, count, budget, now)
  if quota == '' then
    return nil
  end
  local most = cjson.decode(quota)
  if most.jobs then
    local active = redis.call('ZCARD', owned(owner) .. ':queued') + redis.call('ZCARD', owned(owner) .. ':in_progress')
    if active + count > most.jobs then
      return { 'jobs', active, 0 }
    end
  end
  if most.tokens_a_day then
    local day = math.floor(now / 86400000)
    local key = 'reasoner:quota:' .. owner .. ':' .. day
    local booked = number(redis.call('GET', key))
    if booked + budget.tokens > most.tokens_a_day then
      return { 'tokens', booked, (day + 1) * 86400 - math.floor(now / 1000) }
    end
    redis.call('INCRBY', key, ms(budget.tokens))
    redis.call('EXPIRE', key, 172800)
    redis.call('HSET', holder, 'quota', key, 'booked', ms(budget.tokens))
  end
end

-- What was booked becomes what was spent. Right for every end of a job that is retried, too.
local function settle(holder, spent)
  local quota, booked = unpack(redis.call('HMGET', holder, 'quota', 'booked'))
  if quota then
    redis.call('INCRBY', quota, ms(spent - number(booked)))
    redis.call('EXPIRE', quota, 172800)
    redis.call('HSET', holder, 'booked', ms(spent))
  end
end

local function usage_json(id)
  local fields = redis.call('HGETALL', job_key(id))
  local parts = {}
  for i = 1, #fields, 2 do
    local name = string.match(fields[i], '^usage:(.+)$')
    if name then
      parts[#parts + 1] = '"' .. name .. '":' .. fields[i + 1]
    end
  end
  return '{' .. table.concat(parts, ',') .. '}'
end

-- Adds the time since a job's submission to one of the histograms of /metrics.
local function count_time(id, name, now)
  local took = now / 1000 - number(redis.call('HGET', job_key(id), 'created'))
  redis.call('HINCRBY', STATS, name .. ':count', 1)
  redis.call('HINCRBYFLOAT', STATS, name .. ':sum', string.format('%.3f', took))
  for _, bucket in ipairs({ 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800 }) do
    if took <= bucket then
      redis.call('HINCRBY', STATS, name .. ':' .. bucket, 1)
    end
  end
end

-- The one place where a job ends. result and error are JSON; the terminal event carries all that a client waits for.
local function finish(id, status, result, failure)
  local now = now_ms()
  set_status(id, status)
  redis.call('HSET', job_key(id), 'finished', seconds(now), 'result', result, 'error', failure, 'lease', 0)
  redis.call('ZREM', DUE, id)
  list(id, ':ended', ms(now))
  if status ~= 'failed' then
    redis.call('DEL', job_key(id) .. ':keys')
  end
  local seq = append(
    id, 'job.' .. status, '{"result":' .. result .. ',"error":' .. failure .. ',"usage":' .. usage_json(id) .. '}')
  if redis.call('HEXISTS', job_key(id), 'webhook') == 1 then
    redis.call('HSET', job_key(id), 'webhook:state', 'pending', 'webhook:attempt', 0, 'webhook:seq', seq,
      'webhook:error', '')
    redis.call('HINCRBY', job_key(id), 'webhook:token', 1) -- whoever still tells an earlier end is heard no more
    tell_at(id, now)
  end
  local batch, granted, share, generated, verified = unpack(
    redis.call('HMGET', job_key(id), 'batch', 'granted', 'share', 'usage:generated', 'usage:verifier_computed'))
  local spent = number(generated) + number(verified)
  settle(job_key(id), spent)
  if batch then
    leave_share(batch, id, share)
    redis.call('HSET', job_key(id), 'share', 'ended')
    redis.call('HINCRBY', batch_key(batch), 'pool', number(granted) - spent)
    if redis.call('HINCRBY', batch_key(batch), 'running', -1) == 0 then
      redis.call('HSET', batch_key(batch), 'finished', seconds(now))
      generated, verified = unpack(
        redis.call('HMGET', batch_key(batch), 'usage:generated', 'usage:verifier_computed'))
      settle(batch_key(batch), number(generated) + number(verified))
    end
    deal(batch)
  end
  redis.call('HINCRBY', STATS, 'finished:' .. status, 1)
  if result ~= 'null' then
    redis.call('HINCRBY', STATS, 'reason:' .. cjson.decode(result).finish_reason, 1)
  end
  count_time(id, 'job', now)
end

local function give_up(id, stalled)
  local message = 'the job lost its worker ' .. stalled .. ' times in a row without a step forward and is given up'
  list(id, ':dead', redis.call('HGET', job_key(id), 'n'))
  finish(id, 'failed', 'null', cjson.encode({ code = 'max_attempts', message = message }))
end

-- Ends a job that was cancelled and has no owner to tell what it found: with what its journal held when it was cancelled.
local function finish_cancelled(id)
  finish(id, 'cancelled', redis.call('HGET', job_key(id), 'best') or 'null', 'null')
end

-- Removes every trace of a job that has ended.
local function forget(id)
  local status, owner, batch = unpack(redis.call('HMGET', job_key(id), 'status', 'owner', 'batch'))
  for _, index in ipairs({ JOBS, owned(owner) }) do
    for _, kind in ipairs({ '', ':' .. status, ':dead', ':ended' }) do
      redis.call('ZREM', index .. kind, id)
    end
  end
  redis.call('ZREM', WEBHOOKS, id)
  redis.call('DEL', job_key(id), job_key(id) .. ':log', job_key(id) .. ':keys')
  if batch then
    redis.call('LREM', batch_key(batch) .. ':jobs', 1, id)
    if redis.call('EXISTS', batch_key(batch) .. ':jobs') == 0 then -- the last of its jobs: the batch goes with it
      redis.call('DEL', batch_key(batch))
      redis.call('ZREM', 'reasoner:batches', batch)
      redis.call('ZREM', 'reasoner:batches:of:' .. owner, batch)
    end
  end
end

local function record(id, spec, priority, owner, origin, now)
  local n = redis.call('INCR', 'reasoner:submitted')
  redis.call('HSET', job_key(id), 'id', id, 'n', n, 'owner', owner, 'origin', origin, 'spec', spec, 'priority', priority,
    'status', 'queued', 'created', seconds(now), 'attempt', 0, 'token', 0, 'lease', 0, 'seq', 0)
  for _, index in ipairs({ JOBS, owned(owner) }) do
    redis.call('ZADD', index, n, id)
    redis.call('ZADD', index .. ':queued', n, id)
  end
  local webhook = cjson.decode(spec).webhook
  if type(webhook) == 'string' then
    redis.call('HSET', job_key(id), 'webhook', webhook)
  end
  append(id, 'job.queued', '{}')
  look_at(id, now)
end

-- Cancels a job. best is the result (JSON) that its journal allows by now.
local function cancel(id, best)
  local status = redis.call('HGET', job_key(id), 'status')
  if not status then
    return 'gone'
  elseif status == 'queued' or status == 'in_progress' then
    redis.call('HSET', job_key(id), 'cancel', 1, 'best', best)
    if status == 'queued' then
      finish_cancelled(id)
    end
  end
  return 'ok'
end
