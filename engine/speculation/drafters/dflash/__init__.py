"""DFlash heads in their public format: ``config`` reads and checks them, ``head`` drafts with them."""
