"""Number and behaviour of the threads that compute on the CPU.

``processors`` counts the threads that the machine and its control groups allow, ``contention`` falls back to one thread
while other processes compete for the cores, and importing ``short_waits`` before torch keeps OpenMP's threads from
spinning. Import from the modules; none of them imports torch.
"""
