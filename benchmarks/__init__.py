"""Side-by-side runs against other engines, started by ``reasoner bench``. Never imported by the service itself."""
