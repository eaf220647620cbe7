-- Cancel a job: a waiting one at once, a running one through its worker, which is notified at its next commit or
-- heartbeat.
return cancel(ARGV[1], ARGV[2])
