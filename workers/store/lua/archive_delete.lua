-- Forget what is here of a job in the archive that is deleted. `batch`, `idempotency`: '' if it has none.
local id, owner, batch, idempotency = unpack(ARGV)
if redis.call('EXISTS', job_key(id)) == 1 then
  return 0 -- it was brought back
end
if batch ~= '' then
  leave_batch_list(batch, owner, id)
end
if idempotency ~= '' and redis.call('HGET', idempotency, 'job') == id then
  redis.call('DEL', idempotency)
end
return 1
