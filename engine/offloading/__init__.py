"""A lower tier of the KV cache: claimed pages and states that memory has no room for, in host memory and on disk.

``tier`` takes what the cache evicts and finds it again, by the ``records`` of pages and states; ``page_bytes`` copies
them between the cache and the host, ``host_store`` keeps them in host memory, ``disk_store`` in files (``record_file``)
in a folder of its own (``run_folder``). ``loads`` brings them back ahead of a request's first step where that is
cheaper than computing them (``costs``). ``setup`` creates all of it from the engine's options; ``stats`` has the
numbers. Import from the modules.
"""
