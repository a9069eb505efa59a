"""Reports: tables, live views, pages and pictures; the only room that draws."""
