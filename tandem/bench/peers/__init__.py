"""Other engines that Tandem is measured beside, each in a process of its own."""
