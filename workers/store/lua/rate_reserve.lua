-- Reserve a request to a server that counts them: at most so many requests and tokens in the last 60 seconds, counted by
-- whole seconds, and so many open requests; 0 is no limit. Return 0 if it may be sent, or else the milliseconds to wait.
-- The same rules in Python: engine/remote/throttle.py.
local key, ticket = 'reasoner:rate:' .. ARGV[1], ARGV[2]
local limits, more = { r = number(ARGV[3]), t = number(ARGV[4]) }, { r = 1, t = number(ARGV[6]) }
local concurrency, lifetime = number(ARGV[5]), number(ARGV[7])
local now = now_ms()
local second = math.floor(now / 1000)

local pause = number(redis.call('GET', key .. ':pause')) - now
if pause > 0 then
  return math.ceil(pause)
end
redis.call('ZREMRANGEBYSCORE', key .. ':open', '-inf', now) -- those of processes that died
if concurrency > 0 and redis.call('ZCARD', key .. ':open') >= concurrency then
  return 50
end

local used, total, seconds = { r = {}, t = {} }, { r = 0, t = 0 }, {}
local stored = redis.call('HGETALL', key)
for index = 1, #stored, 2 do
  local kind, at = string.sub(stored[index], 1, 1), tonumber(string.sub(stored[index], 2))
  if at < second - 60 then
    redis.call('HDEL', key, stored[index])
  else
    used[kind][at], total[kind] = tonumber(stored[index + 1]), total[kind] + tonumber(stored[index + 1])
    seconds[#seconds + 1] = at
  end
end
table.sort(seconds)
local free_at = 0
for _, kind in ipairs({ 'r', 't' }) do
  local left = total[kind]
  for _, at in ipairs(seconds) do
    if limits[kind] == 0 or left == 0 or left + more[kind] <= limits[kind] then
      break
    end
    if used[kind][at] then
      left = left - used[kind][at]
      used[kind][at] = nil
      free_at = math.max(free_at, at + 61) -- it may have been sent at the end of its second
    end
  end
end
if free_at > 0 then
  return math.max(1, free_at * 1000 - now)
end
redis.call('HINCRBY', key, 'r' .. second, 1)
redis.call('HINCRBY', key, 't' .. second, more.t)
redis.call('EXPIRE', key, 120)
redis.call('ZADD', key .. ':open', now + lifetime, ticket)
redis.call('PEXPIRE', key .. ':open', ms(lifetime))
return 0
