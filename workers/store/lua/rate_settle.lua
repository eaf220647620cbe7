-- Return the ticket of a request, count the tokens that it generated, and pause all requests to its server for so many
-- milliseconds, if the server asked for it.
local key, ticket, generated, pause = 'reasoner:rate:' .. ARGV[1], ARGV[2], number(ARGV[3]), number(ARGV[4])
local now = now_ms()
redis.call('ZREM', key .. ':open', ticket)
if generated > 0 then
  redis.call('HINCRBY', key, 't' .. math.floor(now / 1000), generated)
  redis.call('EXPIRE', key, 120)
end
if pause > 0 and now + pause > number(redis.call('GET', key .. ':pause')) then
  redis.call('SET', key .. ':pause', string.format('%.17g', now + pause), 'PX', ms(pause))
end
return 1
