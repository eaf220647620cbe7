-- Prepended to every script. The keys, the clock, and the two changes that several scripts make: an entry in a job's
-- stream and a change of its status. A script runs alone, so whatever it does is one step to everybody else.
--
--   reasoner:job:ID          hash: spec, status, times, attempt, token (fencing), lease (its end), seq, cancel, usage:*
--   reasoner:job:ID:log      stream: the journal and the events, entry ids are SEQ-0
--   reasoner:job:ID:keys     set: keys of the journal's entries, until the job ends
--   reasoner:jobs, :STATUS   sorted sets of ids by order of submission: all jobs, and those of one status
--   reasoner:due             sorted set of unfinished ids by the time (ms) at which the reaper must look at them
--   reasoner:idempotency:*   hash: job and digest of the body, for a day
--   reasoner:stats           hash: counters for /metrics

local JOBS, DUE, STATS = 'reasoner:jobs', 'reasoner:due', 'reasoner:stats'

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
  local before, n = unpack(redis.call('HMGET', job_key(id), 'status', 'n'))
  redis.call('ZREM', JOBS .. ':' .. before, id)
  redis.call('ZADD', JOBS .. ':' .. status, n, id)
  redis.call('HSET', job_key(id), 'status', status)
end

local function look_at(id, time)
  redis.call('ZADD', DUE, ms(time), id)
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

-- The one place where a job ends. result and error are JSON; the terminal event carries all that a client waits for.
local function finish(id, status, result, failure)
  local now = now_ms()
  set_status(id, status)
  redis.call('HSET', job_key(id), 'finished', seconds(now), 'result', result, 'error', failure, 'lease', 0)
  redis.call('ZREM', DUE, id)
  redis.call('DEL', job_key(id) .. ':keys')
  append(id, 'job.' .. status, '{"result":' .. result .. ',"error":' .. failure .. ',"usage":' .. usage_json(id) .. '}')
  local took = now / 1000 - number(redis.call('HGET', job_key(id), 'created'))
  redis.call('HINCRBY', STATS, 'finished:' .. status, 1)
  redis.call('HINCRBYFLOAT', STATS, 'seconds:sum', string.format('%.3f', took))
  for _, bucket in ipairs({ 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800 }) do
    if took <= bucket then
      redis.call('HINCRBY', STATS, 'seconds:' .. bucket, 1)
    end
  end
end

local function give_up(id, attempts)
  local message = 'the job lost its worker ' .. attempts .. ' times and is given up'
  finish(id, 'failed', 'null', cjson.encode({ code = 'max_attempts', message = message }))
end
