"""Overhead and capacity of the service: durable jobs compared with Celery alone and with a search in-process."""
