"""The HTTP application: routes, middleware and the OpenAPI document put together."""
