-- Several destinations: which topics each gets, as a regular expression, to notice a change; null for all.
ALTER TABLE lane ADD COLUMN topics TEXT;
