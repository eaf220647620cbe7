-- Revokes a key. It stays in the list, so that its holder can be told, and since a service that had a key never goes
-- back to asking for none.
local key = 'reasoner:key:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then
  return 'gone'
end
redis.call('HSETNX', key, 'revoked', seconds(now_ms()))
return 'ok'
