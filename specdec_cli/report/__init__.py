"""Reports: tables, live views, JSON; the only room that draws."""
