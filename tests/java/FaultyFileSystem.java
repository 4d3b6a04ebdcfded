package streammerge.tests;

import java.net.URI;
import org.apache.hadoop.fs.RawLocalFileSystem;

/** The local disk under another scheme, so that a log store can be given to some tables only. */
public class FaultyFileSystem extends RawLocalFileSystem {
  @Override
  public String getScheme() {
    return "faulty";
  }

  @Override
  public URI getUri() {
    return URI.create("faulty:///");
  }
}
