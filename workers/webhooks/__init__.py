"""Delivery of signed webhooks (``deliver``) to public addresses alone (``http``)."""
