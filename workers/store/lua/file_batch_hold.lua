-- Hold a claimed batch for a time (ms), after which any process may claim it.
local batch, token, lease = unpack(ARGV)
if not holds_batch(batch, token) then
  return 'lost'
end
redis.call('ZADD', OPEN_BATCHES, 'XX', ms(now_ms() + lease), batch)
return 'ok'
