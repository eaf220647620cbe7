-- Take a token from a bucket that fills at `rate` tokens per second up to `burst`. The bucket is stored as the time
-- (ms) at which it is full again (GCRA). Return 1 if there was a token (else 0), the number left, the milliseconds
-- until the next token, and those until the bucket is full.
local bucket, rate, burst = 'reasoner:bucket:' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now, step = now_ms(), 1000 / rate
local room = burst * step
-- Clamped to an empty bucket, since the clock may have been set back or the limits changed.
local missing = math.min(room, math.max(0, number(redis.call('GET', bucket)) - now))
local admitted = missing + step <= room
if admitted then
  missing = missing + step
end
redis.call('SET', bucket, string.format('%.17g', now + missing), 'PX', ms(math.ceil(missing)))
local left, wait = math.floor((room - missing) / step), math.max(0, math.ceil(missing + step - room))
return { admitted and 1 or 0, left, wait, math.ceil(missing) }
