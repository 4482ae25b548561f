"""All that is drawn for people: the viewer, and reports, which are pages exported as one offline file each."""
