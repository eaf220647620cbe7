-- Hold the right to export the spans of ended jobs for a term (ms), or extend it, and record the time (ms) up to which
-- they are exported ('': no progress). Return that time; false while another process holds the right. The first one
-- begins with the jobs that end from now on.
local holder, term, exported = unpack(ARGV)
local now = now_ms()
local current, till, upto = unpack(redis.call('HMGET', SPANS, 'holder', 'till', 'exported'))
if current ~= holder and (exported ~= '' or (current and number(till) > now)) then
  return false
end
upto = exported ~= '' and exported or upto or ms(now)
redis.call('HSET', SPANS, 'holder', holder, 'till', ms(now + term), 'exported', upto)
return upto
