-- Claim the unfinished batch that has waited longest for a process to go on with it. The returned token fences off all
-- earlier holders.
local now = now_ms()
local batch = redis.call('ZRANGEBYSCORE', OPEN_BATCHES, '-inf', ms(now), 'LIMIT', 0, 1)[1]
if not batch then
  return {}
end
redis.call('ZADD', OPEN_BATCHES, ms(now + ARGV[1]), batch)
return { redis.call('HINCRBY', batch_key(batch), 'token', 1), ms(now), redis.call('HGETALL', batch_key(batch)) }
