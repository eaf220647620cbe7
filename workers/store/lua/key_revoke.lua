-- Revoke a key. It stays in the list, so that its holder gets the reason, and so that a service that once had a key
-- always requires one.
local key = 'reasoner:key:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then
  return 'gone'
end
redis.call('HSETNX', key, 'revoked', seconds(now_ms()))
return 'ok'
