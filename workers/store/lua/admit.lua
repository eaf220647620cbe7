-- Takes a token out of a bucket that fills at `rate` a second until it holds `burst`. The bucket is one number: the time
-- (ms) at which it is full again (GCRA). Answers whether there was a token, how many are left, and the milliseconds until
-- there is one again, and until the bucket is full.
local bucket, rate, burst = 'reasoner:bucket:' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now, step = now_ms(), 1000 / rate
local room = burst * step
-- At most empty: however the clock was set, or the limits were changed.
local missing = math.min(room, math.max(0, number(redis.call('GET', bucket)) - now))
local admitted = missing + step <= room
if admitted then
  missing = missing + step
end
redis.call('SET', bucket, string.format('%.17g', now + missing), 'PX', ms(math.ceil(missing)))
local left, wait = math.floor((room - missing) / step), math.max(0, math.ceil(missing + step - room))
return { admitted and 1 or 0, left, wait, math.ceil(missing) }
