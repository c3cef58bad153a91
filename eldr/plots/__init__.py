"""Pictures, as matplotlib figures. Needs the extra `plots`, and only once a picture is asked for."""
