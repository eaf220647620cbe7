"""Engines of others and of other machines, over HTTP and behind one interface.

``http.HttpEngine`` talks to one server, ours or an OpenAI-compatible one, ``replicas.ReplicatedEngine`` to
interchangeable ones, and ``router.RoutedEngine`` sends each model's requests to the engine that serves it. Free of
torch.
"""
