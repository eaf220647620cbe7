-- Return for how many further jobs of an owner there is room now, and how many tokens they may reserve; '' without a limit.
local owner, cap, quota = unpack(ARGV)
local jobs, tokens = tonumber(cap) - redis.call('ZCARD', JOBS .. ':queued'), ''
local most = quota == '' and {} or cjson.decode(quota)
if most.jobs then
  local active = redis.call('ZCARD', owned(owner) .. ':queued') + redis.call('ZCARD', owned(owner) .. ':in_progress')
  jobs = math.min(jobs, most.jobs - active)
end
if most.tokens_a_day then
  local booked = number(redis.call('GET', 'reasoner:quota:' .. owner .. ':' .. math.floor(now_ms() / 86400000)))
  tokens = ms(math.max(0, most.tokens_a_day - booked))
end
return { math.max(0, jobs), tokens }
