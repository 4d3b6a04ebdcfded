package streammerge.tests;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermission;
import java.util.EnumSet;
import java.util.Set;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.ChecksumFs;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FsConstants;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * Hadoop's local file systems, without its processes: where it has no native library, as in PySpark, it runs `chmod` for
 * each new file and `readlink` eight times for each that it renames, 23 processes for one commit of Delta.
 */
public final class LocalFiles {
  private LocalFiles() {}

  /** Files on the local disk; what Hadoop asks processes for is asked of the JVM. */
  public static class Raw extends RawLocalFileSystem {
    @Override
    public FileStatus getFileLinkStatus(Path path) throws IOException {
      return Files.isSymbolicLink(pathToFile(path).toPath()) ? super.getFileLinkStatus(path) : getFileStatus(path);
    }

    @Override
    public void setPermission(Path path, FsPermission permission) throws IOException {
      if (permission.getStickyBit()) {
        super.setPermission(path, permission);
        return;
      }
      PosixFilePermission[] lowestLast = PosixFilePermission.values();
      Set<PosixFilePermission> wanted = EnumSet.noneOf(PosixFilePermission.class);
      for (int bit = 0; bit < lowestLast.length; bit++) {
        if ((permission.toShort() >> (lowestLast.length - 1 - bit) & 1) == 1) {
          wanted.add(lowestLast[bit]);
        }
      }
      Files.setPosixFilePermissions(pathToFile(path).toPath(), wanted);
    }
  }

  /** `fs.file.impl`. */
  public static class WithChecksums extends LocalFileSystem {
    public WithChecksums() {
      super(new Raw());
    }
  }

  /** `fs.AbstractFileSystem.file.impl`. */
  public static class ForContexts extends ChecksumFs {
    public ForContexts(URI uri, Configuration conf) throws IOException, URISyntaxException {
      super(new RawForContexts(uri, conf));
    }
  }

  private static class RawForContexts extends DelegateToFileSystem {
    RawForContexts(URI uri, Configuration conf) throws IOException, URISyntaxException {
      super(uri, new Raw(), conf, FsConstants.LOCAL_FS_URI.getScheme(), false);
    }

    @Override
    public int getUriDefaultPort() {
      return -1;
    }

    @Override
    public boolean isValidName(String name) {
      return true;
    }
  }
}
