"""Solutions that the client brought: reading (``candidates``) and shortening (``shorten``) them."""
