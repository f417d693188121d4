"""The gallery: trained models, measured, and the pages in `docs/gallery/` that say which claims hold on them."""
