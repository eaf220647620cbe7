-- Prepended to every script: the keys, the clock, and functions shared by several scripts, such as appending to a job's
-- stream and changing its status. A script is atomic for all other clients.
--
--   reasoner:job:ID          hash: spec, owner, origin, status, times, attempt, token (fencing), lease (its end),
--                            term (its length), grace (1: prolonged without a heartbeat of the worker), seq, cancel,
--                            stalled (consecutive attempts that wrote nothing new to the journal),
--                            waiting (why it was released), detail (the engine's words), unserved (since when, ms),
--                            releases (in a row for its engine), away (those among them that found none),
--                            best (the result of its journal at the cancellation), idempotency (the key of its record),
--                            usage:*, form (data of the request that the route needs besides the spec)
--   reasoner:job:ID:log      stream: the journal and the events, entry ids are SEQ-0
--   reasoner:job:ID:keys     set: keys of the journal's entries, until the job ends for good (a failed one may be retried)
--   reasoner:jobs, :STATUS   sorted sets of ids by order of submission: all jobs, and those of one status
--   reasoner:jobs:dead       likewise: failed jobs that lost their worker too often
--   reasoner:jobs:ended      sorted set of ids of ended jobs by the time (ms) of their end
--   reasoner:jobs:of:OWNER, :of:OWNER:*   the same of one owner
--   reasoner:due             sorted set of ids by the time (ms) at which the reaper must check them: the ends of the leases
--                            of running jobs, and of released ones' delays
--   reasoner:ready:QUEUE:OWNER   sorted set of an owner's queued jobs that can start now, by order of submission
--   reasoner:shares:QUEUE    sorted set of the owners of such jobs by their virtual time: who has the least is next
--   reasoner:shares:QUEUE:idle   likewise other owners whose virtual time is ahead of that of the queue
--   reasoner:shares:QUEUE:full   set of the owners of such jobs who already run as many as they may
--   reasoner:shares          hash: the virtual time of each queue
--   reasoner:starts          hash: the number of recent starts in each queue, which fade, as it was at QUEUE:at (ms), and
--                            the time (ms) of the first of them, QUEUE:since
--   reasoner:owners          hash: what the settings say about the order of each owner's jobs (JSON); '' for all others
--   reasoner:owners:text     the settings from which that hash was made
--   reasoner:deadlines       sorted set of ids of jobs that have not begun by the time (ms) at which they expire
--   reasoner:webhooks        likewise for ids of ended jobs whose webhook is pending; their hashes have webhook (its
--                            address) and webhook:state, :attempt, :token, :at (not before), :seq (of the end), :error
--   reasoner:archiving       hash: ids of ended jobs that are being moved to the archive, each with the pass that moves it,
--                            and of jobs that were brought back from there, whose rows are to be removed
--   reasoner:archiver        hash: the process that moves jobs (holder), the end (till, ms) of its right to do so, and the
--                            number of the last pass (pass)
--   reasoner:waiting         set of ids: jobs that were released because no engine answered, until one does
--   reasoner:sent            hash: the number of messages sent to each queue so far, QUEUE:claimed (those whose worker has
--                            claimed a job, and the lost ones), QUEUE:gone (those that had left the queue at QUEUE:at, ms)
--   reasoner:wakeups         hash: the messages of Celery's that wake a job (run) and its webhook, with placeholders
--   reasoner:idempotency:*   hash: job and digest of the body, for a day; archived: 1 if the job is in the archive
--   reasoner:quota:OWNER:DAY   tokens spent by the owner's jobs of that day (since the epoch), plus those reserved by
--                            unfinished ones: the hash of a job or a batch has its quota, and the amount reserved there
--   reasoner:usage:DAY       hash: OWNER jobs, OWNER tokens and OWNER cost of the jobs that ended on that day (since the
--                            epoch); the hash of a job has what is counted there already (counted:tokens, counted:cost)
--   reasoner:key:ID          hash: name, owner, scopes, digest, created, expires, revoked
--   reasoner:keys            sorted set of ids of keys by order of creation
--   reasoner:bucket:KEY      the time (ms) at which the bucket of a key's requests is full again
--   reasoner:batch:ID        hash: owner, budget, metadata, times, pool (tokens not granted), floors and active (numbers of
--                            jobs that spend their first grant, or a later one), count:STATUS, usage:*, cancel
--   reasoner:batch:ID:jobs   list of its jobs' ids; each job's hash has the batch, the granted tokens, and its share:
--                            floor, waiting, active, closed
--   reasoner:batch:ID:waiting  sorted set of jobs that request more tokens, by the expected gain per token
--                            A batch of a file also has its input, endpoint, window, expires, defaults, stage (validating,
--                            in_progress, finalizing, or its end), closing (cancelled, expired or revoked), token (fencing), fed
--                            and written (positions in the file up to which lines are jobs, or have results: the line's
--                            index, its number in the file, the byte), line_share and line_floor (tokens of each line)
--   reasoner:batch:ID:open   sorted set of the unfinished jobs of a batch of a file, by the index of their line
--   reasoner:batch:ID:refused   hash: the reasons (JSON) why lines of a file cannot become jobs, by their index
--   reasoner:batches:open    sorted set of unfinished batches of files, by the time (ms) at which they can be claimed
--   reasoner:batches:open:of:OWNER   set of the unfinished ones of one owner
--   reasoner:batches:ended   sorted set of ended ones by the time (ms) of their end
--   reasoner:batches, :of:OWNER   sorted sets of ids by order of submission: all batches, and those of one owner
--   reasoner:file:ID         hash: owner, n, filename, purpose, bytes, created, expires, readers (unfinished batches that
--                            read it); the bytes are in the folder of the setting files_dir
--   reasoner:files, :of:OWNER, :for:PURPOSE, :of:OWNER:for:PURPOSE   sorted sets of ids of files by order of creation
--   reasoner:files:bytes     hash: the bytes of all files of each owner
--   reasoner:files:arriving:OWNER   sorted set of ID:BYTES of the owner's uploads that arrive now, by the time (ms) at
--                            which they no longer count
--   reasoner:files:expire    sorted set of ids of files by the time (ms) at which they are deleted
--   reasoner:looked          the time (ms) of the last check for expired leases
--   reasoner:spans           hash: the time (ms) of the last end of a job whose spans are exported, the process that
--                            exports them (holder), and the end (till, ms) of its right to do so
--   reasoner:stats           hash: counters for /metrics

local JOBS, DUE, WEBHOOKS, SENT, STATS = 'reasoner:jobs', 'reasoner:due', 'reasoner:webhooks', 'reasoner:sent', 'reasoner:stats'
local LOOKED = 'reasoner:looked'
local WAITING, DEADLINES = 'reasoner:waiting', 'reasoner:deadlines'
local SHARES, OWNERS, WAKEUPS = 'reasoner:shares', 'reasoner:owners', 'reasoner:wakeups'
local STARTS = 'reasoner:starts'
local FADING_MS = 60000 -- in which the weight of a start falls to 1 / e
local MAX_WAKEUPS = 2000 -- in a queue, for any number of ready jobs: more than workers take between two sweeps
local ARCHIVING, ARCHIVER = 'reasoner:archiving', 'reasoner:archiver'
local FILES = 'reasoner:files'
local SPANS = 'reasoner:spans'
local OPEN_BATCHES, ENDED_BATCHES = 'reasoner:batches:open', 'reasoner:batches:ended'

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

local function open_batches_of(owner)
  return OPEN_BATCHES .. ':of:' .. owner
end

local function file_key(id)
  return 'reasoner:file:' .. id
end

-- Return the sorted sets that list a file.
local function file_indexes(owner, purpose)
  local own = FILES .. ':of:' .. owner
  return { FILES, FILES .. ':for:' .. purpose, own, own .. ':for:' .. purpose }
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

-- Put a message into a queue, behind the others (LPUSH) or in front of them (RPUSH). Before a reaper has said what the
-- messages are, only count it.
local function send_wakeup(queue, id, push)
  local sent = redis.call('HINCRBY', SENT, queue, 1)
  local message = redis.call('HGET', WAKEUPS, queue == 'webhooks' and 'webhook' or 'run')
  if message then
    message = string.gsub(string.gsub(message, 'JOB%-ID', id), 'DELIVERY%-TAG', id .. ':' .. sent)
    redis.call(push, queue, message)
  end
  return sent
end

-- The jobs of a queue start in the order of start-time fair queueing (Goyal, Vin and Cheng 1996): each start moves the
-- virtual time of its owner forward by 1 / weight, and the owner with the least is next. An owner who comes back after
-- a pause does so at the virtual time of the queue, or at its own if that is ahead. One who runs as many jobs as the
-- settings allow pauses until one of them no longer runs.
-- A message wakes a worker, and only its claim decides which job starts. So the order is that of the moment in which a
-- slot is free, whatever is in Celery's list, and the list need not hold a message for each of many jobs.

local function ready_key(queue, owner)
  return 'reasoner:ready:' .. queue .. ':' .. owner
end

local function shares_key(queue)
  return SHARES .. ':' .. queue
end

local function exact(value)
  return string.format('%.17g', value)
end

-- Return what the settings say about the order of an owner's jobs.
local function owner_settings(owner)
  local own, others = unpack(redis.call('HMGET', OWNERS, owner, ''))
  return cjson.decode(own or others or '{"weight":1}')
end

-- Return how many further jobs of an owner may run now.
local function count_room(owner)
  local most = owner_settings(owner).running
  return most and most - redis.call('ZCARD', owned(owner) .. ':in_progress') or math.huge
end

-- Let an owner take part in the sharing of a queue. Return true unless the owner is to pause.
local function enter_shares(queue, owner)
  local key = shares_key(queue)
  if redis.call('SISMEMBER', key .. ':full', owner) == 1 then
    return false
  end
  local time = math.max(number(redis.call('HGET', SHARES, queue)), number(redis.call('ZSCORE', key .. ':idle', owner)))
  redis.call('ZADD', key, 'NX', exact(time), owner)
  redis.call('ZREM', key .. ':idle', owner)
  return true
end

local function leave_shares(queue, owner)
  local key = shares_key(queue)
  local time = redis.call('ZSCORE', key, owner)
  if time then
    redis.call('ZREM', key, owner)
    redis.call('ZADD', key .. ':idle', time, owner)
  end
end

-- Send a message for a job that can start, unless there are enough. Return true if one was sent.
local function announce(queue, id)
  if redis.call('EXISTS', WAKEUPS) == 1 and redis.call('LLEN', queue) < MAX_WAKEUPS then
    send_wakeup(queue, id, 'LPUSH')
    return true
  end
end

-- Let an owner who has paused take part again.
local function leave_full(queue, owner)
  if redis.call('SREM', shares_key(queue) .. ':full', owner) == 1 then
    enter_shares(queue, owner)
    announce(queue, redis.call('ZRANGE', ready_key(queue, owner), 0, 0)[1])
  end
end

-- Let a queued job start as soon as it is its owner's turn. Return true if a message for it was sent.
local function make_ready(id)
  local n, owner, queue = unpack(redis.call('HMGET', job_key(id), 'n', 'owner', 'priority'))
  redis.call('ZREM', DUE, id)
  redis.call('ZADD', ready_key(queue, owner), n, id)
  return enter_shares(queue, owner) and announce(queue, id)
end

-- Keep a job from starting, since it starts or ends now.
local function leave_ready(id)
  local owner, queue = unpack(redis.call('HMGET', job_key(id), 'owner', 'priority'))
  local ready = ready_key(queue, owner)
  if redis.call('ZREM', ready, id) == 1 and redis.call('EXISTS', ready) == 0 then
    leave_shares(queue, owner)
    redis.call('SREM', shares_key(queue) .. ':full', owner)
  end
end

-- Return the job of a queue that starts next, or nothing.
local function find_next(queue)
  local key = shares_key(queue)
  local owner, time = unpack(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES'))
  while owner and count_room(owner) <= 0 do
    leave_shares(queue, owner)
    redis.call('SADD', key .. ':full', owner)
    owner, time = unpack(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES'))
  end
  if owner then
    redis.call('HSET', SHARES, queue, time)
    redis.call('ZREMRANGEBYSCORE', key .. ':idle', '-inf', time)
    return redis.call('ZRANGE', ready_key(queue, owner), 0, 0)[1]
  end
end

local function read_starts(queue, now)
  local count, at, since = unpack(redis.call('HMGET', STARTS, queue, queue .. ':at', queue .. ':since'))
  return number(count) * math.exp(math.min(0, number(at) - now) / FADING_MS), number(since)
end

-- Count a start for the estimates of waits.
local function count_start(queue, now)
  local count, since = read_starts(queue, now)
  if count < 0.05 or since > now then -- after a pause the rate is that of the new starts alone
    count, since = 0, now
  end
  redis.call('HSET', STARTS, queue, exact(count + 1), queue .. ':at', ms(now), queue .. ':since', ms(since))
end

-- Estimate the seconds until so many jobs of some queues have started, at their recent rate; 0 if none has started.
local function estimate_seconds(starts, queues, now)
  local rate = 0 -- starts in a second
  for _, queue in ipairs(queues) do
    local count, since = read_starts(queue, now)
    local observed = math.max(now - since, 1000)
    rate = rate + 1000 * count / FADING_MS / (1 - math.exp(-observed / FADING_MS))
  end
  return rate > 1e-4 and math.max(1, math.min(3600, math.ceil(starts / rate))) or 0
end

-- Return how many jobs of a queue start until one of an owner has `jobs - 1` starts of the owner's before it, if no
-- further jobs come.
local function count_starts_until(queue, owner, jobs)
  local key = shares_key(queue)
  local time = redis.call('ZSCORE', key, owner)
  if not time then
    time = math.max(number(redis.call('HGET', SHARES, queue)), number(redis.call('ZSCORE', key .. ':idle', owner)))
  end
  local turn, starts = time + (jobs - 1) / owner_settings(owner).weight, jobs
  local others = redis.call('ZRANGEBYSCORE', key, '-inf', exact(turn), 'WITHSCORES')
  for i = 1, #others, 2 do
    if others[i] ~= owner then
      local before = math.ceil((turn - others[i + 1]) * owner_settings(others[i]).weight)
      starts = starts + math.min(before, redis.call('ZCARD', ready_key(queue, others[i])))
    end
  end
  return starts
end

-- Charge the start of a ready job to its owner.
local function charge_start(id)
  local owner, queue = unpack(redis.call('HMGET', job_key(id), 'owner', 'priority'))
  if redis.call('ZSCORE', ready_key(queue, owner), id) then
    redis.call('ZINCRBY', shares_key(queue), exact(1 / owner_settings(owner).weight), owner)
    leave_ready(id)
  end
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
  if before == 'in_progress' and status ~= before then
    leave_full('interactive', owner)
    leave_full('batch', owner)
  end
end

-- Add a job to one of the lists besides those by status, or remove it.
local function set_in_list(id, kind, score)
  for _, index in ipairs({ JOBS, owned(redis.call('HGET', job_key(id), 'owner')) }) do
    if score then
      redis.call('ZADD', index .. kind, score, id)
    else
      redis.call('ZREM', index .. kind, id)
    end
  end
end

local function schedule_check(id, time)
  redis.call('ZADD', DUE, ms(time), id)
end

-- Count the start of an attempt.
local function begin_attempt(id)
  redis.call('HINCRBY', job_key(id), 'stalled', 1)
  return redis.call('HINCRBY', job_key(id), 'attempt', 1)
end

-- Uncount an attempt that was released or parked.
local function uncount_attempt(id)
  redis.call('HINCRBY', job_key(id), 'attempt', -1)
  if number(redis.call('HGET', job_key(id), 'stalled')) > 0 then -- otherwise it has written something new
    redis.call('HINCRBY', job_key(id), 'stalled', -1)
  end
end

-- Forget for what a job has waited, since its engine has done something for it.
local function forget_wait(id)
  redis.call('HDEL', job_key(id), 'waiting', 'detail', 'unserved', 'releases', 'away')
end

-- Renew the lease after a sign of life of the worker.
local function renew(id, lease)
  local ends = now_ms() + lease
  redis.call('HSET', job_key(id), 'lease', ms(ends), 'term', lease, 'grace', 0)
  schedule_check(id, ends)
end

-- Move all times of future actions back by as much as the clock was set back (or as a new server's clock is slow);
-- otherwise jobs of dead workers would be kept for as long.
local function set_back(by)
  for _, index in ipairs({ DUE, WEBHOOKS, OPEN_BATCHES }) do
    for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
      redis.call('ZINCRBY', index, -by, id)
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', JOBS .. ':in_progress', 0, -1)) do
    redis.call('HINCRBY', job_key(id), 'lease', -by)
  end
  for _, id in ipairs(redis.call('ZRANGE', JOBS .. ':queued', 0, -1)) do
    if redis.call('HEXISTS', job_key(id), 'unserved') == 1 then
      redis.call('HINCRBY', job_key(id), 'unserved', -by)
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', WEBHOOKS, 0, -1)) do
    redis.call('HINCRBY', job_key(id), 'webhook:at', -by)
  end
end

-- Detect an outage. Called before leases are checked for expiry. After a long time without a check, this server or all
-- reapers were away, and workers may have been unable to send heartbeats: leases that were valid at the last check are
-- prolonged once by their length, so that live workers can renew them. If a worker does not, the next check finds its
-- lease expired, however rare checks are.
local function detect_outage(now)
  local last = number(redis.call('GET', LOOKED))
  redis.call('SET', LOOKED, ms(now))
  local gap = now - last
  if gap < 0 then
    set_back(-gap)
  elseif last > 0 and gap > 750 then -- reapers check twice a second
    for _, id in ipairs(redis.call('ZRANGE', JOBS .. ':in_progress', 0, -1)) do
      local lease, term, grace = unpack(redis.call('HMGET', job_key(id), 'lease', 'term', 'grace'))
      local ends = ms(now + number(term))
      if 3 * gap > number(term) and number(lease) > last and grace ~= '1' then
        redis.call('HSET', job_key(id), 'lease', ends, 'grace', 1)
        schedule_check(id, ends)
      end
    end
  end
end

-- Schedule the delivery of a job's end, at `time` at the earliest.
local function schedule_webhook(id, time)
  redis.call('HSET', job_key(id), 'webhook:at', ms(time))
  redis.call('HDEL', job_key(id), 'webhook:sent')
  redis.call('ZADD', WEBHOOKS, ms(time), id)
end

-- Distribute the pool of a batch by the rule of reasoner.budget.allocator. Grants wake their jobs.
local function distribute_pool(batch)
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
        return -- tokens left over by active jobs may still be granted to it
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
    if redis.call('HGET', job_key(id), 'status') == 'queued' then -- otherwise it asks just now
      make_ready(id)
    end
  end
end

-- Remove a job from its share's counters, since it requests more tokens or has ended.
local function leave_share(batch, id, share)
  local counter = ({ floor = 'floors', active = 'active' })[share]
  if counter then
    redis.call('HINCRBY', batch_key(batch), counter, -1)
  end
  redis.call('ZREM', batch_key(batch) .. ':waiting', id)
end

-- Return the response to a repeated submission with this idempotency key, or nothing if it is the first one.
local function find_repeat(idempotency, digest, key_of)
  local earlier, body, archived = unpack(redis.call('HMGET', idempotency, 'job', 'digest', 'archived'))
  if earlier and (archived or redis.call('EXISTS', key_of(earlier)) == 1) then
    return { body == digest and 'replayed' or 'conflict', earlier }
  end
end

-- Check an owner's quota (JSON; empty for none) for `count` further jobs of a queue with a token budget. Reserve the tokens on the
-- holder, the hash of a job or a batch, until its end, or return the reason of the refusal.
local function reserve_quota(holder, owner, quota, count, budget, now, queue)
  if quota == '' then
    return nil
  end
  local most = cjson.decode(quota)
  if most.jobs then
    local active = redis.call('ZCARD', owned(owner) .. ':queued') + redis.call('ZCARD', owned(owner) .. ':in_progress')
    if active + count > most.jobs then
      local seconds = 0 -- unknown
      if queue and redis.call('EXISTS', ready_key(queue, owner)) == 1 then -- as many of its jobs start as end
        seconds = estimate_seconds(count_starts_until(queue, owner, active + count - most.jobs), { queue }, now)
      end
      return { 'jobs', active, seconds }
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

-- Replace the reserved tokens by the spent ones. Also correct for each end of a retried job.
local function charge_quota(holder, spent)
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

-- Add the time since a job's submission to one of the histograms of /metrics.
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

-- Count the end of a job of a batch, or of the feeding of a file's lines. The last of them ends the bill of the batch.
local function leave_batch(batch, now)
  if redis.call('HINCRBY', batch_key(batch), 'running', -1) == 0 then
    redis.call('HSET', batch_key(batch), 'finished', seconds(now))
    local generated, verified = unpack(
      redis.call('HMGET', batch_key(batch), 'usage:generated', 'usage:verifier_computed'))
    charge_quota(batch_key(batch), number(generated) + number(verified))
  end
end

-- Add what a job has spent since it last ended to its owner's usage of the day, which is kept for 100 days.
local function count_usage(id, now)
  local owner, generated, verified, cost, tokens_before, cost_before = unpack(redis.call('HMGET', job_key(id), 'owner',
    'usage:generated', 'usage:verifier_computed', 'usage:cost', 'counted:tokens', 'counted:cost'))
  local tokens, day = number(generated) + number(verified), 'reasoner:usage:' .. math.floor(now / 86400000)
  if not tokens_before then
    redis.call('HINCRBY', day, owner .. ' jobs', 1)
  end
  redis.call('HINCRBY', day, owner .. ' tokens', ms(tokens - number(tokens_before)))
  redis.call('HINCRBYFLOAT', day, owner .. ' cost', string.format('%.17g', number(cost) - number(cost_before)))
  redis.call('EXPIRE', day, 8640000)
  redis.call('HSET', job_key(id), 'counted:tokens', ms(tokens), 'counted:cost', string.format('%.17g', number(cost)))
end

-- End a job; all ends go through here. `result` and `failure` are JSON; the terminal event contains all that clients
-- wait for.
local function finish(id, status, result, failure)
  local now = now_ms()
  leave_ready(id)
  redis.call('ZREM', DEADLINES, id)
  set_status(id, status)
  redis.call('HSET', job_key(id), 'finished', seconds(now), 'result', result, 'error', failure, 'lease', 0)
  redis.call('ZREM', DUE, id)
  set_in_list(id, ':ended', ms(now))
  if status ~= 'failed' then
    redis.call('DEL', job_key(id) .. ':keys')
  end
  local seq = append(
    id, 'job.' .. status, '{"result":' .. result .. ',"error":' .. failure .. ',"usage":' .. usage_json(id) .. '}')
  if redis.call('HEXISTS', job_key(id), 'webhook') == 1 then
    redis.call('HSET', job_key(id), 'webhook:state', 'pending', 'webhook:attempt', 0, 'webhook:seq', seq,
      'webhook:error', '')
    redis.call('HINCRBY', job_key(id), 'webhook:token', 1) -- invalidates deliveries of an earlier end
    schedule_webhook(id, now)
  end
  local batch, granted, share, generated, verified = unpack(
    redis.call('HMGET', job_key(id), 'batch', 'granted', 'share', 'usage:generated', 'usage:verifier_computed'))
  local spent = number(generated) + number(verified)
  charge_quota(job_key(id), spent)
  count_usage(id, now)
  if batch then
    redis.call('ZREM', batch_key(batch) .. ':open', id)
    if granted then
      leave_share(batch, id, share)
      redis.call('HSET', job_key(id), 'share', 'ended')
      redis.call('HINCRBY', batch_key(batch), 'pool', number(granted) - spent)
    end
    leave_batch(batch, now)
    distribute_pool(batch)
  end
  redis.call('HINCRBY', STATS, 'finished:' .. status, 1)
  if result ~= 'null' then
    redis.call('HINCRBY', STATS, 'reason:' .. cjson.decode(result).finish_reason, 1)
  end
  count_time(id, 'job', now)
end

local function fail_poison_job(id, stalled)
  local message = 'the job lost its worker ' .. stalled .. ' times in a row without a step forward and is given up'
  set_in_list(id, ':dead', redis.call('HGET', job_key(id), 'n'))
  finish(id, 'failed', 'null', cjson.encode({ code = 'max_attempts', message = message }))
end

local function fail_expired_job(id)
  local message = 'no worker was free to begin the job before its deadline'
  finish(id, 'failed', 'null', cjson.encode({ code = 'expired', message = message }))
end

-- End a cancelled job without a worker, with the result that its journal had at the cancellation.
local function finish_cancelled(id)
  finish(id, 'cancelled', redis.call('HGET', job_key(id), 'best') or 'null', 'null')
end

local function list_batch(batch, owner)
  local n = redis.call('INCR', 'reasoner:submitted:batches')
  redis.call('ZADD', 'reasoner:batches', n, batch)
  redis.call('ZADD', 'reasoner:batches:of:' .. owner, n, batch)
end

local function delete_batch(batch, owner)
  redis.call('DEL', batch_key(batch))
  redis.call('ZREM', 'reasoner:batches', batch)
  redis.call('ZREM', 'reasoner:batches:of:' .. owner, batch)
  redis.call('ZREM', ENDED_BATCHES, batch)
end

local function holds_batch(batch, token)
  return redis.call('HGET', batch_key(batch), 'token') == token
end

-- Forget a job of a batch that is deleted.
local function leave_batch_list(batch, owner, id)
  if redis.call('LREM', batch_key(batch) .. ':jobs', 1, id) == 1 then -- otherwise a line of a file
    if redis.call('EXISTS', batch_key(batch) .. ':jobs') == 0 then -- that was the last job, so delete the batch
      delete_batch(batch, owner)
    end
  end
end

-- Remove all keys of a job that has ended.
local function remove_job(id)
  local status, owner = unpack(redis.call('HMGET', job_key(id), 'status', 'owner'))
  for _, index in ipairs({ JOBS, owned(owner) }) do
    for _, kind in ipairs({ '', ':' .. status, ':dead', ':ended' }) do
      redis.call('ZREM', index .. kind, id)
    end
  end
  redis.call('ZREM', WEBHOOKS, id)
  redis.call('DEL', job_key(id), job_key(id) .. ':log', job_key(id) .. ':keys')
end

local function delete_job(id)
  local owner, batch = unpack(redis.call('HMGET', job_key(id), 'owner', 'batch'))
  remove_job(id)
  if batch then
    leave_batch_list(batch, owner, id)
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
  local fields = cjson.decode(spec)
  if type(fields.webhook) == 'string' then
    redis.call('HSET', job_key(id), 'webhook', fields.webhook)
  end
  if type(fields.deadline) == 'number' then
    redis.call('ZADD', DEADLINES, ms(fields.deadline * 1000), id)
  end
  append(id, 'job.queued', '{}')
  make_ready(id)
end

-- Cancel a job. `best`: the result (JSON) of its journal so far.
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

-- Forget a file's record.
local function forget_file(id, owner, purpose, bytes)
  for _, index in ipairs(file_indexes(owner, purpose)) do
    redis.call('ZREM', index, id)
  end
  redis.call('ZREM', FILES .. ':expire', id)
  redis.call('HINCRBY', FILES .. ':bytes', owner, ms(0 - number(bytes))) -- Lua writes the negative of 0 as -0
  redis.call('DEL', file_key(id))
end

-- Record a file whose bytes are stored. `keep`: the time (ms) until it is deleted; '' for ever.
local function record_file(id, owner, filename, purpose, bytes, keep)
  if redis.call('EXISTS', file_key(id)) == 1 then
    return -- a repetition, since the first response was lost
  end
  local now = now_ms()
  local n = redis.call('INCR', 'reasoner:submitted:files')
  redis.call('HSET', file_key(id), 'id', id, 'owner', owner, 'n', n, 'filename', filename, 'purpose', purpose,
    'bytes', bytes, 'created', seconds(now))
  for _, index in ipairs(file_indexes(owner, purpose)) do
    redis.call('ZADD', index, n, id)
  end
  redis.call('HINCRBY', FILES .. ':bytes', owner, bytes)
  if keep ~= '' then
    redis.call('HSET', file_key(id), 'expires', seconds(now + keep))
    redis.call('ZADD', FILES .. ':expire', ms(now + keep), id)
  end
end
