"""Clients of engines over HTTP: our server, OpenAI-compatible ones, several models and replicas behind one client.

``http.HttpEngine`` talks to one server, ``replicas.ReplicatedEngine`` to interchangeable ones, and
``router.RoutedEngine`` sends each model's requests to the engine that serves it. Free of torch.
"""
