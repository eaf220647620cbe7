-- Renew the leases of a worker's jobs, each given as id, token and lease; return their states, which also tell of a
-- cancellation by the client.
local function beat(id, token, lease)
  local status, current, cancel = unpack(redis.call('HMGET', job_key(id), 'status', 'token', 'cancel'))
  if status ~= 'in_progress' or current ~= token then
    return 'lost'
  end
  renew(id, lease)
  return cancel and 'cancel' or 'ok'
end

local states = {}
for i = 1, #ARGV, 3 do
  states[#states + 1] = beat(unpack(ARGV, i, i + 2))
end
return states
